"""`distmon verify`: compare records under every parallelism with those of the unsharded model."""

from __future__ import annotations

from typing import cast

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from csrc_triton.row_layout import BIN_WORDS, BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.errors import ConfigError
from distmon.reduce.rank_slots import SLOT_SIZE
from distmon.sampling.reading import SampleSize
from distmon.verify import Difference, Verdict, verify
from distmon.verify.columns import INSIDE_KINDS, PARAMETER_KINDS
from distmon.verify.parallelisms import PARALLELISMS, select
from distmon.verify.verification import INTERVAL

SAMPLE_SIZES = ("auto", "sampled", "exact")


def print_verification(
    console: Console, parallel: str, model: str | None, ranks: int, steps: int, sample_size: str
) -> bool:
    """Run, print the tables, and return whether no configuration is off or failed."""
    if ranks < 2:
        raise ConfigError(f"--ranks must be at least 2, not {ranks}")
    if steps < INTERVAL:
        raise ConfigError(f"--steps must be at least {INTERVAL}, not {steps}")
    if sample_size not in SAMPLE_SIZES:
        raise ConfigError(
            f'--sample-size must be one of {", ".join(SAMPLE_SIZES)}, not "{sample_size}"'
        )
    chosen = select(parallel)
    verdicts: list[Verdict] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=len(chosen))
        for verdict in verify(
            chosen,
            model,
            ranks,
            steps,
            cast(SampleSize, sample_size),
            lambda name: progress.update(bar, description=name),
        ):
            verdicts.append(verdict)
            progress.advance(bar)
    console.print(_summary(verdicts, ranks, steps, model))
    if any(v.comparison is not None for v in verdicts):
        console.print(_inside(verdicts))
    console.print(_legend(verdicts, ranks), markup=False, highlight=False)
    _print_skipped(console, verdicts)
    for verdict in verdicts:
        _print_details(console, verdict)
    off = [v.parallelism.name for v in verdicts if not v.ok]
    skipped = sum(bool(v.skipped) for v in verdicts)
    right = len(verdicts) - len(off) - skipped
    console.print(
        f"{right} right, {skipped} skipped, {len(off)} off{': ' * bool(off)}{', '.join(off)}",
        style="red" if off else "green",
        highlight=False,
    )
    return not off


def print_configurations(console: Console) -> None:
    """Print every name that `--parallel` accepts, with a description."""
    table = Table("configuration", "description", "ranks", title="distmon verify")
    for parallelism in PARALLELISMS.values():
        need = f"{parallelism.min_ranks}+" if parallelism.min_ranks > 1 else "1"
        if parallelism.rank_multiple > 1:
            need += f", multiple of {parallelism.rank_multiple}"
        table.add_row(parallelism.name, parallelism.summary, need)
    console.print(table)


def _summary(verdicts: list[Verdict], ranks: int, steps: int, model: str | None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{model or 'built-in model'}: {ranks} ranks against one process, {steps} steps in "
        f"float64, every {INTERVAL}nd observed",
    )
    table.add_column("configuration", no_wrap=True)
    for kind in PARAMETER_KINDS:
        table.add_column(kind, justify="right")
    table.add_column("read per rank", justify="right", no_wrap=True)
    table.add_column("copies", justify="right")
    table.add_column("coll.", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("", no_wrap=True)
    for verdict in verdicts:
        table.add_row(verdict.parallelism.name, *_cells(verdict))
    return table


def _inside(verdicts: list[Verdict]) -> Table:
    """Return the table of what is inside the model, by configuration that ran."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="inside the model")
    table.add_column("configuration", no_wrap=True)
    for kind in INSIDE_KINDS:
        table.add_column(kind, justify="right", no_wrap=True)
    for verdict in verdicts:
        if verdict.comparison is not None:
            sizes = (_size(verdict.comparison.worst(kind)) for kind in INSIDE_KINDS)
            table.add_row(verdict.parallelism.name, *sizes)
    return table


def _cells(verdict: Verdict) -> list[str | Text]:
    comparison = verdict.comparison
    if comparison is None:
        mark = Text("failed", "red") if verdict.error else Text("skipped", "yellow")
        return [*[""] * (len(PARAMETER_KINDS) + 4), mark]
    low, high = min(comparison.sampled), max(comparison.sampled)
    return [
        *(_size(comparison.worst(kind)) for kind in PARAMETER_KINDS),
        f"{low}..{high}" if low < high else str(low),
        f"{sum(comparison.sampled) / comparison.sample:.2f}",
        str(comparison.collectives),
        str(comparison.nbytes),
        Text("ok", "green") if comparison.ok else Text("off", "red"),
    ]


def _size(difference: Difference | None) -> str | Text:
    if difference is None:
        return ""
    text = "0" if difference.size == 0 else f"{difference.size:.0e}"
    return Text(text, "red") if difference.is_off else text


def _legend(verdicts: list[Verdict], ranks: int) -> str:
    compared = [v.comparison for v in verdicts if v.comparison is not None]
    lines = [
        "Each number is the largest relative difference of any column of that kind, over all "
        "parameters, modules and observations; of spectra, from the third observation on.",
        "read per rank: sampled elements; copies: elements read by all ranks, divided by the size "
        f"of the sample of all parameters{f' ({compared[0].sample})' if compared else ''}.",
        f"bytes: {len(SUM_COLUMNS)} sums x 8 + {BINS} bins in {BIN_WORDS[0]} to {BINS} x 8 + "
        f"{len(MAX_COLUMNS)} maxima x 4 per parameter, {SLOT_SIZE} x 8 per rank ({ranks} ranks),",
        "2 x 8 per loss, 8 per sampled element of a partial gradient, and the rows of what is "
        "inside the model.",
    ]
    if compared:
        low, high = (f(c.coverage.covered for c in compared) for f in (min, max))
        lines.append(
            "norms over all elements within 2 standard errors of their estimate: "
            f"{low}{f' to {high}' if high > low else ''} of {compared[0].coverage.estimated} with "
            "an error bar."
        )
    noise = sorted({name for c in compared for name in c.not_compared})
    if noise:
        lines.append(
            "gradient and update not compared, because the gradient is zero except for rounding: "
            + ", ".join(noise)
        )
    return "\n".join(lines)


def _print_skipped(console: Console, verdicts: list[Verdict]) -> None:
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.skipped:
            by_reason.setdefault(verdict.skipped, []).append(verdict.parallelism.name)
    for reason, names in by_reason.items():
        text = Text.assemble(("skipped", "yellow"), f" {', '.join(names)}: {reason}")
        console.print(text, highlight=False)


def _print_details(console: Console, verdict: Verdict) -> None:
    """Print why a configuration failed or is off."""
    name = verdict.parallelism.name
    if verdict.error:
        console.print(Text.assemble((f"{name} failed", "red"), f": {verdict.error}"))
    if verdict.comparison is None or verdict.comparison.ok:
        return
    for problem in verdict.comparison.problems:
        console.print(Text.assemble((name, "red"), f": {problem}"))
    if not verdict.comparison.off:
        return
    table = Table(title=f"{name}: columns beyond their limit")
    table.add_column("column", no_wrap=True)
    for heading in ("difference", "limit", "expected", "found", "step"):
        table.add_column(heading, justify="right")
    table.add_column("worst parameter", overflow="fold")
    for d in verdict.comparison.off:
        limit = f"{d.limit:.0e}" if d.limit else "0"
        numbers = (f"{d.size:.2g}", limit, f"{d.expected:.6g}", f"{d.found:.6g}")
        table.add_row(d.column, *numbers, str(d.step), d.parameter or "(all)")
    console.print(table)

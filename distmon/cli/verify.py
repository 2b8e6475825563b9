"""`distmon verify`: the model distributed in every way, held against itself unsharded."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.errors import ConfigError
from distmon.layout.arrangements import ARRANGEMENTS, select
from distmon.reduce import SLOT_SIZE
from distmon.verify import Difference, Verdict, verify
from distmon.verify.columns import KINDS
from distmon.verify.runs import INTERVAL


def print_verification(
    console: Console, parallel: str, model: str | None, ranks: int, steps: int
) -> bool:
    """Run, print the tables, and say whether every configuration was right."""
    if ranks < 2:
        raise ConfigError(f"--ranks must be at least 2, not {ranks}")
    if steps < INTERVAL:
        raise ConfigError(f"--steps must be at least {INTERVAL}, not {steps}")
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
            chosen, model, ranks, steps, lambda name: progress.update(bar, description=name)
        ):
            verdicts.append(verdict)
            progress.advance(bar)
    console.print(_summary(verdicts, ranks, steps, model))
    console.print(_legend(verdicts, ranks), markup=False, highlight=False)
    _print_skipped(console, verdicts)
    for verdict in verdicts:
        _print_details(console, verdict)
    off = [v.arrangement.name for v in verdicts if not v.ok]
    skipped = sum(bool(v.skipped) for v in verdicts)
    right = len(verdicts) - len(off) - skipped
    console.print(
        f"{right} right, {skipped} skipped, {len(off)} off{': ' * bool(off)}{', '.join(off)}",
        style="red" if off else "green",
        highlight=False,
    )
    return not off


def print_configurations(console: Console) -> None:
    """Every name that `--parallel` knows, with what it is."""
    table = Table("configuration", "what it is", "ranks", title="distmon verify")
    for arrangement in ARRANGEMENTS.values():
        need = f"{arrangement.at_least}+" if arrangement.at_least > 1 else "1"
        if arrangement.multiple_of > 1:
            need += f", multiple of {arrangement.multiple_of}"
        table.add_row(arrangement.name, arrangement.summary, need)
    console.print(table)


def _summary(verdicts: list[Verdict], ranks: int, steps: int, model: str | None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{model or 'built-in model'}: {ranks} ranks against one process, {steps} steps in "
        f"float64, every {INTERVAL}nd observed",
    )
    table.add_column("configuration", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right")
    table.add_column("read per rank", justify="right", no_wrap=True)
    table.add_column("copies", justify="right")
    table.add_column("coll.", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("", no_wrap=True)
    for verdict in verdicts:
        table.add_row(verdict.arrangement.name, *_cells(verdict))
    return table


def _cells(verdict: Verdict) -> list[str]:
    comparison = verdict.comparison
    if comparison is None:
        mark = "[red]failed[/]" if verdict.error else "[yellow]skipped[/]"
        return [*[""] * (len(KINDS) + 4), mark]
    low, high = min(comparison.sampled), max(comparison.sampled)
    return [
        *(_size(comparison.worst(kind)) for kind in KINDS),
        f"{low}..{high}" if low < high else str(low),
        f"{sum(comparison.sampled) / comparison.sample:.2f}",
        str(comparison.collectives),
        str(comparison.nbytes),
        "[green]ok[/]" if comparison.ok else "[red]off[/]",
    ]


def _size(difference: Difference | None) -> str:
    if difference is None:
        return ""
    text = "0" if difference.size == 0 else f"{difference.size:.0e}"
    return f"[red]{text}[/]" if difference.is_off else text


def _legend(verdicts: list[Verdict], ranks: int) -> str:
    compared = [v.comparison for v in verdicts if v.comparison is not None]
    lines = [
        "A number is the worst relative difference of any column of that kind, over all parameters "
        "and observations.",
        "read per rank: sampled elements; copies: those of all ranks together over those of one "
        f"sample of all parameters{f' ({compared[0].sample})' if compared else ''}.",
        f"bytes: for each parameter {len(SUM_COLUMNS)} sums x 8 + {BINS} bins x 8 + "
        f"{len(MAX_COLUMNS)} maxima x 4, for each of {ranks} ranks {SLOT_SIZE} x 8, for each loss "
        "2 x 8;",
        "of a gradient that the ranks still have to add, also each sampled element x 8.",
    ]
    noise = sorted({name for c in compared for name in c.not_compared})
    if noise:
        lines.append(
            "gradient and update not compared, because the gradient is zero but for rounding: "
            + ", ".join(noise)
        )
    return "\n".join(lines)


def _print_skipped(console: Console, verdicts: list[Verdict]) -> None:
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.skipped:
            by_reason.setdefault(verdict.skipped, []).append(verdict.arrangement.name)
    for reason, names in by_reason.items():
        text = f"[yellow]skipped[/] {', '.join(names)}: {escape(reason)}"
        console.print(text, highlight=False)


def _print_details(console: Console, verdict: Verdict) -> None:
    """Why a configuration failed or is off."""
    name = verdict.arrangement.name
    if verdict.error:
        console.print(f"[red]{name} failed[/]: {escape(verdict.error)}", highlight=False)
    if verdict.comparison is None or verdict.comparison.ok:
        return
    for problem in verdict.comparison.problems:
        console.print(f"[red]{name}[/]: {escape(problem)}", highlight=False)
    if not verdict.comparison.off:
        return
    table = Table(title=f"{name}: what is off")
    table.add_column("column", no_wrap=True)
    for heading in ("difference", "limit", "expected", "found", "step"):
        table.add_column(heading, justify="right")
    table.add_column("worst parameter", overflow="fold")
    for d in verdict.comparison.off:
        limit = f"{d.limit:.0e}" if d.limit else "0"
        numbers = (f"{d.size:.2g}", limit, f"{d.expected:.6g}", f"{d.found:.6g}")
        table.add_row(d.column, *numbers, str(d.step), d.parameter or "(all)")
    console.print(table)

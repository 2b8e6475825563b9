"""How far distmon's numbers are from the float64 truth, on real kinds of model.

    python -m benchmarks.accuracy --quick             # a few minutes
    python -m benchmarks.accuracy                     # everything
    python -m benchmarks.accuracy --families gpt2,bert --modes sampled --batches 64
    python -m benchmarks.accuracy --report runs/accuracy
    python -m benchmarks.accuracy --report runs/gpt2 runs/bert --out runs/both

Writes `readings.csv` (one line per number), `accuracy.md` and `accuracy.png` into the folder given
with --out. With --report the tables and the plot are made anew from the readings of earlier runs,
each of which may be of some families: a long run can be cut into short ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .families import FAMILIES
from .further_families import FURTHER
from .observing import DTYPES, unsupported_modes
from .plan import Plan, run
from .plot import write_plot
from .readings import Reading, conditions, read_conditions, read_csv, write_csv
from .summary import Summary
from .tables import all_tables, markdown

MODES: Final = ("auto", "sampled", "exact")
BATCHES: Final = (64, 256, 4096)
QUICK_BATCHES: Final = (64, 256)
READINGS: Final = "readings.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parse(arguments)
    console = Console()
    out: Path = options.out
    if options.report is not None:
        return _report_again(console, options.report, options.out)
    refused = unsupported_modes(options.modes)
    notes = [f"mode {mode}: not supported by this version" for mode in refused]
    for note in notes:
        console.print(note)
    modes = [mode for mode in options.modes if mode not in refused]
    if not modes:
        return 1
    torch.set_num_threads(options.threads)
    plan = Plan(
        families=options.families,
        modes=modes,
        batches=options.batches,
        dtypes=options.dtypes,
        observations=options.observations,
        training_steps=options.training_steps,
        interval=options.interval,
        seed=options.seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    under = conditions(plan.seed, plan.interval)
    readings = _run_with_progress(plan, console)
    write_csv(out / READINGS, readings, under)
    _report(console, out, readings, under, notes)
    return 0


def _report_again(console: Console, folders: Sequence[Path], out: Path) -> int:
    """Report on the readings of earlier runs: in their own folder, or in `out` for several."""
    paths = [folder / READINGS for folder in folders]
    readings = [reading for path in paths for reading in read_csv(path)]
    under = [read_conditions(path) for path in paths]
    if any(each != under[0] for each in under):
        console.print(f"not one run: the conditions of {', '.join(map(str, folders))} differ")
        return 1
    if len(folders) == 1:
        out = folders[0]
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / READINGS, readings, under[0])
    _report(console, out, readings, under[0], [])
    return 0


def _run_with_progress(plan: Plan, console: Console) -> list[Reading]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting", total=plan.steps)
        return list(run(plan, lambda text: progress.update(task, advance=1, description=text)))


def _report(
    console: Console,
    out: Path,
    readings: Sequence[Reading],
    under: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    summary = Summary(readings)
    for table in all_tables(summary):
        console.print(table.for_console())
    (out / "accuracy.md").write_text(markdown(summary, under, notes))
    write_plot(out / "accuracy.png", summary)
    console.print(f"written to {out}: {READINGS}, accuracy.md, accuracy.png")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="two sizes of batch, few steps")
    parser.add_argument(
        "--families",
        type=_names(FAMILIES),
        default=[name for name in FAMILIES if name not in FURTHER],
    )
    parser.add_argument("--modes", type=_names(None), default=list(MODES))
    parser.add_argument("--batches", type=_sizes, help="tokens, such as 64,256,4096")
    parser.add_argument("--dtypes", type=_names(DTYPES), default=list(DTYPES))
    parser.add_argument("--observations", type=int, help="per family, dtype, batch and stage")
    parser.add_argument("--training-steps", type=int, help="before the stage `trained`")
    parser.add_argument(
        "--interval", type=int, default=100, help="that monitors are configured with"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    parser.add_argument(
        "--report", type=Path, nargs="+", help="folders of earlier runs; nothing is trained"
    )
    options = parser.parse_args(arguments)
    for name, quick, full in (
        ("batches", list(QUICK_BATCHES), list(BATCHES)),
        ("observations", 3, 6),
        ("training_steps", 50, 100),
    ):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def _names(known: Collection[str] | None) -> Callable[[str], list[str]]:
    """Return a parser of `a,b` that accepts known names only; None accepts all."""

    def parse(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",") if part.strip()]
        for name in found:
            if known is not None and name not in known:
                raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
        return found

    return parse


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())

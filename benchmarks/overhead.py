"""What watching a training costs: distmon and others, side by side in one run.

    python benchmarks/overhead.py                     # GPT-2, growth and 2 ranks, below 10 minutes
    python benchmarks/overhead.py --full              # everything
    python benchmarks/overhead.py --workloads gpt2 --contenders 'distmon sampled,naive clone'

Contenders take turns after each real training step, so that each finds caches as cold as in life
and drift of the machine hits all alike. Ratios count; the times are those of this machine. Writes
`rounds.csv`, `context.json`, plots and a page into the folder given with --out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distmon_benchmarks import machine, measuring, ranks
from distmon_benchmarks.contenders import CONTENDERS, Contender, find
from distmon_benchmarks.contenders.none import NONE
from distmon_benchmarks.results import ResultsWriter
from distmon_benchmarks.workloads import DTYPES, WORKLOADS, Dtype, Workload, find_workloads

QUICK: Final[tuple[tuple[str, Dtype], ...]] = (
    ("gpt2", "fp32"),
    *((w.name, "fp32") for w in WORKLOADS if w.growth and w.name not in ("huge", "moe")),
    ("tensors-1000", "bf16"),
)
"""What a quick run trains. bf16 is slow on most CPUs, so only a small model is in it."""
GROWTH_RACE_S: Final = 40.0
"""For one size of a workload that shows growth, in a quick run."""


@dataclass(frozen=True)
class Plan:
    """What a run measures."""

    cases: Sequence[tuple[Workload, Dtype]]
    contenders: Sequence[Contender]
    rounds: int
    limit_s: float
    """For the observations of one contender in one case."""
    ranks: Sequence[int]
    parallel: Sequence[str]
    """How ranks share the work."""
    full: bool

    def of(self, workload: Workload) -> list[Contender]:
        """Who takes part in it."""
        return [c for c in self.contenders if c.in_growth or self.full or not workload.growth]

    def footprints(self, workload: Workload) -> bool:
        """Whether memory is measured: it takes a process and four steps for each contender."""
        return self.full or not workload.growth

    def race_limit_s(self, workload: Workload) -> float:
        """After so long three rounds must do."""
        return GROWTH_RACE_S if workload.growth and not self.full else math.inf

    @property
    def steps(self) -> int:
        """For the progress bar."""
        cases = (
            measuring.steps(self.of(workload), self.rounds, self.footprints(workload))
            for workload, _ in self.cases
        )
        return sum(cases) + len(self.ranks) * len(self.parallel)


def run(plan: Plan, out: Path, console: Console) -> None:
    """Measure everything of the plan and write it to `out`."""
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    conditions = {
        "optimizer": "fused AdamW",
        "rounds": f"{plan.rounds}, "
        f"3 for a contender whose observations take more than {plan.limit_s:g} s"
        + ("" if plan.full else f" or where growth takes more than {GROWTH_RACE_S:g} s"),
    }
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        ResultsWriter(out, machine.context(conditions)) as writer,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=plan.steps)
        for workload, dtype in plan.cases:
            before = progress.tasks[task].completed
            contenders = plan.of(workload)
            measuring.measure(
                workload,
                dtype,
                contenders,
                writer,
                rounds=plan.rounds,
                limit_s=plan.limit_s,
                footprints=plan.footprints(workload),
                device=device,
                advance=lambda what: progress.update(task, advance=1, description=what),
                race_limit_s=plan.race_limit_s(workload),
            )
            # Also when it was skipped.
            whole = measuring.steps(contenders, plan.rounds, plan.footprints(workload))
            progress.update(task, completed=before + whole)
        for parallel in plan.parallel:
            for number in plan.ranks:
                progress.update(task, description=f"{number} ranks of {parallel}")
                _race_on_ranks(parallel, number, plan.rounds, writer)
                progress.update(task, advance=1)
        writer.context.load_after = machine.load()
        minutes = (time.monotonic() - begin) / 60
        writer.context.conditions["duration"] = f"{minutes:.0f} minutes"


def _race_on_ranks(parallel: str, number: int, rounds: int, writer: ResultsWriter) -> None:
    writer.context.conditions[ranks.SMALL.name] = ranks.SMALL.conditions
    case, result = ranks.run(parallel, number, rounds)
    for name, problem in result.wrong.items():
        writer.context.found_wrong(name, f"{number} ranks of {parallel}", problem)
    for name, measure, round, value in result.numbers:
        writer.add(case, name, measure, round, value)


def read_plan(arguments: Sequence[str] | None = None) -> tuple[Plan, Path]:
    """From the command line; exits with code 2 and one sentence when something is wrong there."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="below 10 minutes; the default")
    size.add_argument("--full", action="store_true", help="all workloads in fp32 and bf16, 4 ranks")
    parser.add_argument("--workloads", help="names with commas; those of the size when absent")
    parser.add_argument("--contenders", help="names with commas; all when absent")
    parser.add_argument("--dtypes", help="fp32,bf16")
    parser.add_argument("--ranks", help="numbers with commas, 0 for no ranks")
    parser.add_argument("--rounds", type=int, help="15 with --full, else 5")
    parser.add_argument("--limit", type=float, help="seconds per contender; 8, or 120 with --full")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args(arguments)
    full: bool = options.full
    dtypes = _split(options.dtypes)
    if unknown := set(dtypes) - set(DTYPES):
        _refuse(f"there is no dtype {', '.join(sorted(unknown))}", [*DTYPES])
    try:
        workloads = find_workloads(_split(options.workloads) or [w.name for w in WORKLOADS])
    except KeyError as error:
        _refuse(f"there is no workload {error.args[0]}", [w.name for w in WORKLOADS])
    cases = [
        (workload, dtype)
        for workload in workloads
        for dtype in DTYPES
        if (dtype in dtypes if dtypes else dtype == "fp32" or full or not options.workloads)
        and (full or options.workloads or (workload.name, dtype) in QUICK)
    ]
    try:
        names = _split(options.contenders) or [c.name for c in CONTENDERS]
        contenders = find({*names, NONE.name})
    except KeyError as error:
        _refuse(f"there is no contender {error.args[0]}", [c.name for c in CONTENDERS])
    rounds = options.rounds if options.rounds is not None else 15 if full else 5
    if rounds < 2:
        _refuse(f"--rounds must be at least 2, not {rounds}")
    default = "0" if options.workloads or options.contenders else "1,2,4" if full else "1,2"
    numbers = _split(options.ranks or default)
    if not all(each.isdigit() for each in numbers):
        _refuse(f"--ranks must be numbers with commas, not {options.ranks}")
    return Plan(
        cases,
        contenders,
        rounds,
        options.limit if options.limit is not None else 120.0 if full else 8.0,
        [int(each) for each in numbers if int(each) > 0],
        [*ranks.PARALLEL] if full or options.ranks else ["ddp"],
        full,
    ), options.out


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _refuse(sentence: str, valid: Sequence[str] = ()) -> NoReturn:
    listed = f"; there are {', '.join(valid)}" if valid else ""
    print(f"benchmarks/overhead.py: {sentence}{listed}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    plan, out = read_plan()
    console = Console()
    run(plan, out, console)
    from distmon_benchmarks import page, table

    page.write(out)
    table.show(out)
    console.print(f"written to {out}", highlight=False)


if __name__ == "__main__":
    main()

"""What a run measures, and how long it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.scale import ranks
from distmon.bench import measuring
from distmon.bench.contender import Contender
from distmon.bench.interleaved import Rounds
from distmon.bench.machine import this_machine
from distmon.bench.results import ResultsWriter
from distmon.bench.training import Dtype, Workload

GROWTH_RACE_S: Final = 25.0
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

    def contenders_of(self, workload: Workload) -> list[Contender]:
        """Return those that take part in a workload."""
        return [c for c in self.contenders if c.in_growth or self.full or not workload.growth]

    def footprints(self, workload: Workload) -> bool:
        """Return whether memory is measured: a process and four steps for each contender."""
        return self.full or not workload.growth

    def rounds_of(self, workload: Workload) -> Rounds:
        """Return how often each contender is timed."""
        hurried = workload.growth and not self.full
        return Rounds(self.rounds, self.limit_s, GROWTH_RACE_S if hurried else math.inf)

    def steps_of(self, workload: Workload) -> int:
        """Return the steps of the progress bar for one case."""
        contenders = self.contenders_of(workload)
        return measuring.steps(contenders, self.rounds, self.footprints(workload))


def run(plan: Plan, out: Path, console: Console) -> None:
    """Measure everything of the plan and write it to `out`."""
    begin = time.monotonic()
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    total = sum(plan.steps_of(workload) for workload, _ in plan.cases)
    total += len(plan.ranks) * len(plan.parallel)
    with (
        ResultsWriter(out, this_machine()) as writer,
        Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress,
    ):
        bar = progress.add_task("", total=total)
        done = 0
        for workload, dtype in plan.cases:
            measuring.measure(
                workload,
                dtype,
                plan.contenders_of(workload),
                writer,
                plan.rounds_of(workload),
                footprints=plan.footprints(workload),
                advance=lambda what: progress.update(bar, advance=1, description=what),
            )
            done += plan.steps_of(workload)  # fewer when something was skipped
            progress.update(bar, completed=done)
        for parallel in plan.parallel:
            for number in plan.ranks:
                progress.update(bar, description=f"{number} ranks of {parallel}")
                ranks.write_race(parallel, number, plan.rounds, writer)
                progress.update(bar, advance=1)
    console.print(f"measured in {(time.monotonic() - begin) / 60:.1f} minutes", highlight=False)

"""Has distmon become slower from one run to the next?

    python -m benchmarks.compare OLD NEW [--limit 0.2]

OLD and NEW are results files, or folders with one. Times of two runs cannot be compared, because
the machine may have changed; ratios can. So each contender is held against a reference of the same
run, such as a naive clone, and the two ratios are compared. A regression is a ratio that has become
worse by more than the limit, with an interval (bootstrap over rounds) that excludes less. The
confidence holds for all comparisons together. An answer that has become wrong is a regression too.

Exit code 0: no regression. 1: at least one, a line for each. 2: the runs cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich import box
from rich.table import Table

from benchmarks.intervals import Interval, change_interval
from benchmarks.summary import wide_console
from distmon.bench.contenders import GRADIENT_NORMS, NAIVE_CLONE
from distmon.bench.formatting import times
from distmon.bench.results import Case, Pairs, Results, ResultsError, read

OURS: Final = "distmon"
"""Contenders whose names begin so are compared unless others are asked for."""
REFERENCES: Final = (NAIVE_CLONE.name, GRADIENT_NORMS.name)
FEWEST_ROUNDS: Final = 5
"""With fewer, resampling rounds has next to no meaning."""


@dataclass(frozen=True)
class Comparison:
    """One contender against one reference, measured in both runs."""

    case: Case
    contender: str
    reference: str
    old: Pairs
    new: Pairs

    def __str__(self) -> str:
        return f"{self.contender} against {self.reference} on {self.case.name}"

    @property
    def obstacle(self) -> str:
        """Why the two cannot be compared; empty when they can."""
        rounds = min(self.old.shape[1], self.new.shape[1])
        if rounds < FEWEST_ROUNDS:
            return f"{rounds} rounds, fewer than {FEWEST_ROUNDS}"
        if min(self.old.min(), self.new.min()) <= 0:
            return "a time that is not above 0"
        return ""


def comparisons(
    old: Results, new: Results, contenders: Sequence[str], references: Sequence[str]
) -> Iterator[Comparison]:
    """Yield what both runs have measured."""
    wanted = contenders or [name for name in new.contenders if name.startswith(OURS)]
    for case in new.cases:
        for contender in wanted:
            for reference in references:
                pairs = [run.pairs(case, contender, reference) for run in (old, new)]
                if contender != reference and all(each.size for each in pairs):
                    yield Comparison(case, contender, reference, *pairs)


def newly_wrong(old: Results, new: Results) -> list[str]:
    """Return a line for each answer of distmon that was right and no longer is."""
    checked = {(row.case, row.contender) for row in old.rows if row.measure == "answer"}
    return [
        f"regression: {contender} on {case.name} gives a wrong answer: {what}"
        for (case, contender), what in new.wrong_answers.items()
        if contender.startswith(OURS)
        and (case, contender) in checked
        and (case, contender) not in old.wrong_answers
    ]


def compare(old: Results, new: Results, options: argparse.Namespace) -> list[str]:
    """Print the table and return the regressions; a `ResultsError` when nothing is comparable."""
    wanted = [_names(options.contenders), _names(options.references)]
    found = [*comparisons(old, new, *wanted)]
    notes = [f"not compared: {each}, {each.obstacle}" for each in found if each.obstacle]
    usable = [each for each in found if not each.obstacle]
    if not usable:
        reason = notes[0] if notes else "no contender and reference were measured in both"
        raise ResultsError(f"the two runs have nothing to compare: {reason}")
    of_each = 1 - (1 - options.confidence) / len(usable)
    changes = [change_interval(each.old, each.new, of_each) for each in usable]
    limit = 1 + options.limit
    regressions = newly_wrong(old, new)
    regressions += [
        f"regression: {each} takes {times(change.estimate)} as long as before "
        f"(interval {times(change.low)} to {times(change.high)}, limit {times(limit)})"
        for each, change in zip(usable, changes, strict=True)
        if change.low > limit
    ]
    wide_console().print(_table(usable, changes, new, limit))
    print(*notes, *regressions, sep="\n", end="\n" if notes or regressions else "")
    if not regressions:
        print(f"no regression over {options.limit:.0%} in {len(usable)} comparisons")
    return regressions


def _table(
    usable: Sequence[Comparison], changes: Sequence[Interval], new: Results, limit: float
) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("workload", "contender", "against", "change", "interval", ""):
        table.add_column(heading, no_wrap=heading in ("change", "interval"))
    for each, change in zip(usable, changes, strict=True):
        wrong = ", answer wrong" if (each.case, each.contender) in new.wrong_answers else ""
        table.add_row(
            each.case.name,
            f"{each.contender}{wrong}",
            each.reference,
            times(change.estimate),
            f"{times(change.low)} to {times(change.high)}",
            "[red]regression[/]" if change.low > limit else "[green]ok[/]",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two runs and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.compare", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("old", type=Path, help="results of the run before")
    parser.add_argument("new", type=Path, help="results of the run after")
    parser.add_argument("--limit", type=float, default=0.2, help="0.2 allows 20%% worse")
    parser.add_argument("--confidence", type=float, default=0.95, help="of all intervals together")
    parser.add_argument("--contenders", default="", help="comma-separated; else all of distmon")
    parser.add_argument("--references", default=",".join(REFERENCES), help="comma-separated")
    options = parser.parse_args(arguments)
    try:
        if not options.limit >= 0:
            raise ResultsError(f"--limit must be 0 or more, not {options.limit}")
        if not 0 < options.confidence < 1:
            raise ResultsError(f"--confidence must be between 0 and 1, not {options.confidence}")
        return 1 if compare(read(options.old), read(options.new), options) else 0
    except ResultsError as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        return 2


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())

"""Has distmon become slower from one run to the next?

    python benchmarks/compare.py OLD NEW [--limit 0.2]

OLD and NEW are results folders. Times of two runs cannot be compared, because the machine may have
changed between them; ratios can. So each contender is held against a reference of the same run,
such as a naive clone, and the two ratios are compared. A regression is a ratio that has become
worse by more than the limit, and whose interval (bootstrap over rounds) excludes that it is less.
The confidence holds for all comparisons of a call together: the more there are, the wider each
interval. An answer that has become wrong is a regression too.

Exit code 0: no regression. 1: at least one, a line for each. 2: the folders cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from distmon_benchmarks import wording
from distmon_benchmarks.intervals import Interval, Pairs, change_interval, paired
from distmon_benchmarks.results import Case, ResultsError
from distmon_benchmarks.summary import GRADIENT_NORMS, NAIVE, Summary, case_name, load

OURS: Final = "distmon"
"""Contenders whose names begin so are compared unless others are asked for."""
REFERENCES: Final = (NAIVE, GRADIENT_NORMS)
FEWEST_ROUNDS: Final = 5
"""With fewer, resampling rounds says next to nothing."""


@dataclass(frozen=True)
class Comparable:
    """One contender against one reference, measured in both runs."""

    case: Case
    contender: str
    reference: str
    old: Pairs
    new: Pairs

    @property
    def obstacle(self) -> str:
        """Why the two cannot be compared; empty when they can."""
        rounds = min(self.old.shape[1], self.new.shape[1])
        if rounds < FEWEST_ROUNDS:
            return f"{rounds} rounds, fewer than {FEWEST_ROUNDS}"
        if min(self.old.min(), self.new.min()) <= 0:
            return "a time that is not above 0"
        return ""


@dataclass(frozen=True)
class Verdict:
    """What became of a ratio. `change` is 1 when nothing has changed, above 1 when it is worse."""

    compared: Comparable
    change: Interval
    limit: float

    @property
    def is_regression(self) -> bool:
        """Worse by more than the limit, beyond doubt."""
        return self.change.low > 1 + self.limit

    @property
    def line(self) -> str:
        """One sentence for a log."""
        c = self.compared
        return (
            f"regression: {c.contender} on {case_name(c.case)} takes "
            f"{wording.times(self.change.estimate)} as long against {c.reference} as before "
            f"(interval {wording.times(self.change.low)} to {wording.times(self.change.high)}, "
            f"limit {wording.times(1 + self.limit)})"
        )


def compare(
    old: Summary,
    new: Summary,
    limit: float = 0.2,
    confidence: float = 0.95,
    contenders: Sequence[str] = (),
    references: Sequence[str] = REFERENCES,
) -> tuple[list[Verdict], list[str]]:
    """Verdicts, and a line for each pair that could not be judged.

    A `ResultsError` when there is nothing to judge.
    """
    found = [*_comparables(old, new, contenders, references)]
    notes = [
        f"not compared: {c.contender} against {c.reference} on {case_name(c.case)}, {c.obstacle}"
        for c in found
        if c.obstacle
    ]
    judged = [c for c in found if not c.obstacle]
    if not judged:
        reason = notes[0] if notes else "no contender and reference were measured in both"
        raise ResultsError(f"the two runs have nothing to compare: {reason}")
    of_each = 1 - (1 - confidence) / len(judged)
    return [Verdict(c, change_interval(c.old, c.new, of_each), limit) for c in judged], notes


def newly_wrong(old: Summary, new: Summary) -> list[str]:
    """A line for each contender of ours that was right and no longer is."""
    return [
        f"regression: {name} gives a wrong answer: {what}"
        for name, what in new.context.wrong.items()
        if name.startswith(OURS) and name not in old.context.wrong
    ]


def _comparables(
    old: Summary, new: Summary, contenders: Sequence[str], references: Sequence[str]
) -> Iterator[Comparable]:
    wanted = contenders or [name for name in new.contenders if name.startswith(OURS)]
    for case in new.cases:
        for contender in wanted:
            for reference in references:
                if contender == reference:
                    continue
                pairs = [_pairs(run, case, contender, reference) for run in (old, new)]
                if all(p.size for p in pairs):
                    yield Comparable(case, contender, reference, *pairs)


def _pairs(run: Summary, case: Case, contender: str, reference: str) -> Pairs:
    return paired(
        run.rounds.get((case, contender, "observation"), {}),
        run.rounds.get((case, reference, "observation"), {}),
    )


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("workload", "contender", "against"):
        table.add_column(heading)
    for heading in ("change", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for verdict in verdicts:
        c, change = verdict.compared, verdict.change
        table.add_row(
            case_name(c.case),
            c.contender,
            c.reference,
            wording.times(change.estimate),
            f"{wording.times(change.low)} to {wording.times(change.high)}",
            "[red]regression[/]" if verdict.is_regression else "[green]ok[/]",
        )
    return table


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("old", type=Path, help="results folder of the run before")
    parser.add_argument("new", type=Path, help="results folder of the run after")
    parser.add_argument("--limit", type=float, default=0.2, help="0.2 allows 20%% worse")
    parser.add_argument("--confidence", type=float, default=0.95, help="of all intervals together")
    parser.add_argument("--contenders", default="", help="comma-separated; else all of distmon")
    parser.add_argument(
        "--references", default=",".join(REFERENCES), help="comma-separated, what they are held to"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and give the exit code."""
    options = _options(arguments)
    try:
        if not options.limit >= 0:
            raise ResultsError(f"--limit must be 0 or more, not {options.limit}")
        if not 0 < options.confidence < 1:
            raise ResultsError(f"--confidence must be between 0 and 1, not {options.confidence}")
        old, new = load(options.old), load(options.new)
        regressions = newly_wrong(old, new)
        verdicts, notes = compare(
            old,
            new,
            options.limit,
            options.confidence,
            _names(options.contenders),
            _names(options.references),
        )
    except ResultsError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(_table(verdicts))
    regressions += [verdict.line for verdict in verdicts if verdict.is_regression]
    for line in (*notes, *regressions):
        print(line)
    if not regressions:
        print(f"no regression over {options.limit:.0%} in {len(verdicts)} comparisons")
    return 1 if regressions else 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())

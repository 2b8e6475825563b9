"""`verify`: the truth once, then every arrangement against it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distmon.errors import ConfigError
from distmon.layout.arrangements import PLAIN, Arrangement
from distmon.verify.compare import Comparison, compare
from distmon.verify.expected import Expected, expect
from distmon.verify.observe import Observed
from distmon.verify.ranks import Job, Outcome, RankSet, Skipped, attempt, first_failure
from distmon.verify.workloads import check_rows, load_workload

INTERVAL = 2
"""Every second step is observed; what a step costs without an observation shows in between."""


@dataclass(frozen=True)
class Verdict:
    """What became of one arrangement. Exactly one of the last three is set."""

    arrangement: Arrangement
    ranks: int
    comparison: Comparison | None = None
    skipped: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Skipped counts as right."""
        return not self.error and (self.comparison is None or self.comparison.ok)


def verify(
    arrangements: Sequence[Arrangement],
    source: str | None,
    ranks: int,
    steps: int,
    begin: Callable[[str], None] = lambda _: None,
) -> Iterator[Verdict]:
    """Verdicts one by one, in the given order; `begin` is told the name of each before it runs.

    `source` is `module:factory`, or None for the built-in model. Bad input is a `ConfigError`,
    raised before any process is started.
    """
    job = Job(source, steps, INTERVAL)
    check_rows(load_workload(source), ranks)
    distributed: RankSet | None = None
    try:
        if any(a is not PLAIN and not a.misfit(ranks) for a in arrangements):
            distributed = RankSet(ranks, job)  # they start while the truth is computed here
        begin("the unsharded model")
        expected = _truth(job)
        for arrangement in arrangements:
            reason = arrangement.misfit(ranks)
            if reason:
                yield Verdict(arrangement, ranks, skipped=reason)
                continue
            begin(arrangement.name)
            outcomes: list[Outcome]
            if arrangement is PLAIN:
                outcomes = [_alone(job)]
            else:
                if distributed is None or distributed.broken:
                    if distributed is not None:
                        distributed.close()
                    distributed = RankSet(ranks, job)
                outcomes = distributed.run(arrangement.name)
            error = first_failure(outcomes)
            if error:
                yield Verdict(arrangement, len(outcomes), error=error)
                continue
            reasons = [o.reason for o in outcomes if isinstance(o, Skipped)]
            if reasons:
                yield Verdict(arrangement, len(outcomes), skipped=reasons[0])
                continue
            observed = [o for o in outcomes if isinstance(o, Observed)]
            comparison = compare(expected, observed, arrangement.limits, INTERVAL)
            yield Verdict(arrangement, len(outcomes), comparison)
    finally:
        if distributed is not None:
            distributed.close()


def _truth(job: Job) -> list[Expected]:
    try:
        return expect(load_workload(job.source), job.steps, job.interval)
    except Exception as error:
        raise ConfigError(
            f"the unsharded model cannot be trained: {type(error).__name__}: {error}"
        ) from error


def _alone(job: Job) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return attempt(PLAIN.name, job, Path(folder))

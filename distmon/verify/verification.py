"""`verify`: compute the reference once, then compare every parallelism with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distmon.errors import ConfigError
from distmon.sampling.reading import SampleSize, choose_reading
from distmon.verify.compare import Comparison, compare
from distmon.verify.expected import Expected, expect
from distmon.verify.observe import Observed
from distmon.verify.parallelisms import PLAIN, Parallelism
from distmon.verify.rank_processes import (
    Job,
    Outcome,
    RankProcesses,
    Skipped,
    attempt,
    first_failure,
)
from distmon.verify.workloads import check_rows, load_workload

INTERVAL = 2
"""Every second step is observed, so that the collectives of the other steps can be subtracted."""


@dataclass(frozen=True)
class Verdict:
    """The result of one parallelism. Exactly one of the last three fields is set."""

    parallelism: Parallelism
    ranks: int
    comparison: Comparison | None = None
    skipped: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a skipped parallelism counts as ok."""
        return not self.error and (self.comparison is None or self.comparison.ok)


def verify(
    parallelisms: Sequence[Parallelism],
    source: str | None,
    ranks: int,
    steps: int,
    sample_size: SampleSize = "sampled",
    begin: Callable[[str], None] = lambda _: None,
) -> Iterator[Verdict]:
    """Yield a verdict for each parallelism; call `begin` with its name before it runs.

    `source` is `module:factory`, or None for the built-in model; `sample_size` is the monitor's
    setting, with `auto` reading all gradients. Raises ConfigError for bad input,
    before any process is started.
    """
    job = Job(source, steps, INTERVAL, sample_size)
    check_rows(load_workload(source), ranks)
    processes: RankProcesses | None = None
    try:
        if any(p is not PLAIN and not p.unsupported_reason(ranks) for p in parallelisms):
            processes = RankProcesses(ranks, job)  # they start while this process trains
        begin("the unsharded model")
        expected = _reference(job)
        for parallelism in parallelisms:
            reason = parallelism.unsupported_reason(ranks)
            if reason:
                yield Verdict(parallelism, ranks, skipped=reason)
                continue
            begin(parallelism.name)
            outcomes: list[Outcome]
            if parallelism is PLAIN:
                outcomes = [_single_process(job)]
            else:
                if processes is None or processes.broken:
                    if processes is not None:
                        processes.close()
                    processes = RankProcesses(ranks, job)
                outcomes = processes.run(parallelism.name)
            yield _verdict(parallelism, outcomes, expected)
    finally:
        if processes is not None:
            processes.close()


def _verdict(
    parallelism: Parallelism, outcomes: Sequence[Outcome], expected: Sequence[Expected]
) -> Verdict:
    error = first_failure(outcomes)
    if error:
        return Verdict(parallelism, len(outcomes), error=error)
    reasons = [o.reason for o in outcomes if isinstance(o, Skipped)]
    if reasons:
        return Verdict(parallelism, len(outcomes), skipped=reasons[0])
    observed = [o for o in outcomes if isinstance(o, Observed)]
    comparison = compare(expected, observed, parallelism.limits, INTERVAL)
    return Verdict(parallelism, len(outcomes), comparison)


def _reference(job: Job) -> list[Expected]:
    reading = choose_reading(job.sample_size, None, job.interval, 0.0)
    try:
        return expect(load_workload(job.source), job.steps, job.interval, reading)
    except Exception as error:
        raise ConfigError(
            f"the unsharded model cannot be trained: {type(error).__name__}: {error}"
        ) from error


def _single_process(job: Job) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return attempt(PLAIN.name, job, Path(folder))

"""Searches after an observation, where its reduced numbers show a problem.

Every rank decides from the same reduced numbers and nothing else, so all ranks take part in the
same searches in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.collect.finite_watch import SIGNALS, Evidence
from distmon.collect.task_gradients import Measured
from distmon.errors import CollectiveError
from distmon.reduce.channel import Channel, Pending
from distmon.reduce.findings import Desync, NonFinite
from distmon.reduce.locate import (
    SearchSteps,
    Split,
    find_desync,
    locate_desync,
    locate_nonfinite,
)
from distmon.reduce.process_group import Ranks
from distmon.reduce.reduced import any_nonzero
from distmon.reduce.task_norms import reduce_task_norms
from distmon.sampling.plan import SamplePlan

log = logging.getLogger("distmon")
Fields = Mapping[str, NDArray[np.float64]]
"""Fields of the rank slots: `fields[name][rank]`."""


@dataclass(frozen=True)
class Found:
    """Results of the searches; empty where nothing was searched."""

    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)
    """Gradient norm of each task over the global batch."""


_NOTHING: Final = Found()


@dataclass(frozen=True)
class LocalEvidence:
    """What this rank kept of an observed step, for the searches that may follow."""

    step: int
    evidence: Evidence | None
    row_checksums: torch.Tensor
    tasks: Measured | None


class Search:
    """Searches that are under way; `poll` takes them as far as the other ranks have come."""

    found = _NOTHING
    _pending = Pending()

    def __init__(self, steps: SearchSteps[Found] | None, channel: Channel) -> None:
        """`steps`: None where there is nothing to search."""
        self._steps = steps
        self._channel = channel

    def poll(self) -> bool:
        """Return whether everything is found. Raises CollectiveError when it cannot be."""
        while self._steps is not None and self._pending.done():
            self._pending.join()
            try:
                self._pending = self._channel.launch(next(self._steps))
            except StopIteration as end:
                self.found, self._steps = end.value, None
            except CollectiveError:
                raise
            except Exception as error:
                # The other ranks wait for what this rank can no longer contribute.
                raise CollectiveError(f"search: {type(error).__name__}: {error}") from error
        return self._steps is None


class Searches:
    """Locates NaN and diverged replicas, and reduces the gradients of tasks."""

    def __init__(
        self,
        ranks: Ranks,
        plan: Callable[[], SamplePlan],
        count: Callable[[], torch.Tensor],
        replica_check: bool,
        now: Callable[[], int] = lambda: 0,
    ) -> None:
        """`count` counts NaN and Inf on this rank; `now` returns the step that it has completed."""
        self._ranks = ranks
        self._plan = plan
        self._count_nonfinite = count
        self._replica_check = replica_check
        self._now = now

    def begin(self, fields: Fields, sampled_nonfinite: bool, local: LocalEvidence) -> Search:
        """Search for what the reduced numbers show: `fields` of the slots, and the rows."""
        is_news = _is_news(fields, sampled_nonfinite)
        diverged = find_desync(fields) if self._replica_check else None
        if not is_news and diverged is None and local.tasks is None:
            return Search(None, self._ranks.searches)
        return Search(self._run(fields, is_news, diverged, local), self._ranks.searches)

    def _run(
        self, fields: Fields, is_news: bool, diverged: Split | None, local: LocalEvidence
    ) -> SearchSteps[Found]:
        nonfinite, desync, tasks = None, None, {}
        if is_news:
            nonfinite = yield from self._locate_nonfinite(fields, local)
        if diverged is not None:
            desync = yield from locate_desync(
                self._ranks, self._plan(), local.row_checksums, diverged
            )
        if local.tasks is not None and {*fields["task_key"].tolist()} == {float(local.tasks.key)}:
            tasks = yield from reduce_task_norms(self._ranks.size, local.tasks)
        return Found(nonfinite, desync, tasks)

    def _locate_nonfinite(self, fields: Fields, local: LocalEvidence) -> SearchSteps[NonFinite]:
        signaled, evidence = fields["signal_step"], local.evidence
        if signaled.any():
            first_step = int(signaled[signaled > 0].min())
            first_rank = int(np.flatnonzero(signaled == first_step)[0])
            signal = int(fields["signal_kind"][first_rank])
            counts = evidence.counts if evidence else self._no_counts()
            of_step, counted_at = evidence.step if evidence else 0, 0
        else:
            first_step, signal = local.step, SIGNALS.index("sample")
            # On a device a sampled NaN is known when the observation has arrived: some steps later.
            counts, of_step, counted_at = self._count(), local.step, self._now()
        located = yield from locate_nonfinite(
            self._ranks, self._plan().names, counts, of_step, first_step, signal, counted_at
        )
        counted = int(fields["signal_counted_at"][signaled == first_step].max(initial=0))
        return replace(located, counted_at=counted) if counted > first_step else located

    def _count(self) -> torch.Tensor:
        """Count on this rank. Nothing may raise here: the other ranks are in the search."""
        try:
            return self._count_nonfinite()
        except Exception as error:
            log.warning(
                "distmon: counting NaN and Inf failed on rank %d (%s: %s); "
                "continuing without the counts of this rank",
                self._ranks.rank,
                type(error).__name__,
                error,
            )
            return self._no_counts()

    def _no_counts(self) -> torch.Tensor:
        return torch.zeros((len(self._plan().names), 4), dtype=torch.int64)


def _is_news(fields: Fields, sampled_nonfinite: bool) -> bool:
    """Return whether something is not finite that no record has located yet."""
    if not (sampled_nonfinite or any_nonzero(fields["signal_step"])):
        return False
    return not fields["nonfinite_known"].all()

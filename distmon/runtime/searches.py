"""Collective searches after an observation, where its reduced numbers show a problem.

Every rank decides from the same reduced numbers and nothing else, so all ranks enter the same
searches in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distmon.collect.finite_watch import SIGNALS, Evidence
from distmon.collect.task_gradients import TaskGradients
from distmon.layout import Shard
from distmon.probe.exact import nonfinite_counts
from distmon.reduce.buffers import Reduced
from distmon.reduce.findings import Desync, NonFinite
from distmon.reduce.locate import find_desync, locate_desync, locate_nonfinite
from distmon.reduce.process_group import Ranks
from distmon.reduce.task_norms import reduce_task_norms
from distmon.sampling.plan import SamplePlan

log = logging.getLogger("distmon")


@dataclass(frozen=True)
class Found:
    """Results of the searches; empty where nothing was searched."""

    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)
    """Gradient norm of each task over the global batch."""


class Searches:
    """Locates NaN and diverged replicas, and reduces the gradients of tasks."""

    def __init__(
        self,
        ranks: Ranks,
        plan: SamplePlan,
        shards: Sequence[Shard],
        tasks: TaskGradients,
        replica_check: bool,
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._shards = shards
        self._tasks = tasks
        self._replica_check = replica_check

    def run(
        self, reduced: Reduced, step: int, evidence: Evidence | None, row_checksums: torch.Tensor
    ) -> Found:
        """Search for what `reduced` shows. A collective call.

        `evidence` and `row_checksums` are this rank's own.
        """
        nonfinite = self._locate_nonfinite(reduced, step, evidence)
        diverged = find_desync(reduced.ranks) if self._replica_check else None
        desync = None
        if diverged is not None:
            desync = locate_desync(self._ranks, self._plan, row_checksums, diverged)
        measured = self._tasks.take(reduced.ranks["task_key"].tolist())
        tasks = {} if measured is None else reduce_task_norms(self._ranks, measured)
        return Found(nonfinite, desync, tasks)

    def _locate_nonfinite(
        self, reduced: Reduced, step: int, evidence: Evidence | None
    ) -> NonFinite | None:
        signaled = reduced.ranks["signal_step"]
        if reduced.ranks["nonfinite_known"].all():
            return None
        if not (signaled.any() or reduced.sample_has_nonfinite):
            return None
        if signaled.any():
            first_step = int(signaled[signaled > 0].min())
            first_rank = int(np.flatnonzero(signaled == first_step)[0])
            signal = int(reduced.ranks["signal_kind"][first_rank])
            counts = evidence.counts if evidence else self._no_counts()
            counted_at = evidence.step if evidence else 0
        else:
            first_step, signal = step, SIGNALS.index("sample")
            counts, counted_at = self._count(), step
        device = self._plan.device
        return locate_nonfinite(
            self._ranks, self._plan.names, counts, counted_at, first_step, signal, device
        )

    def _count(self) -> torch.Tensor:
        """Count on this rank. Nothing may raise here: the other ranks are in the search."""
        try:
            return nonfinite_counts(self._shards)
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
        return torch.zeros((len(self._shards), 4), dtype=torch.int64)

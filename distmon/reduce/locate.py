"""Locate NaN and diverged replicas: which parameter on which rank.

Exchanges besides the two collectives of an observation. All ranks decide on them from the same
reduced numbers, so all ranks take part. A search is a generator: it yields what is to be reduced
over all ranks, is resumed when that is done, and returns its result. No rank waits in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from distmon.collect.finite_watch import SIGNALS
from distmon.reduce.channel import Reduction
from distmon.reduce.findings import Desync, NonFinite, NonFinitePlace
from distmon.reduce.process_group import Ranks
from distmon.sampling.plan import SamplePlan
from distmon.sampling.sample import REPLICA_CLASSES

Floats = NDArray[np.float64]
_Result = TypeVar("_Result")
SearchSteps = Generator[Reduction, None, _Result]
"""Yields tensors on the host to reduce in place; returns what was found."""

MOST_PLACES = 64


def locate_nonfinite(
    ranks: Ranks,
    names: Sequence[str],
    evidence: torch.Tensor,
    evidence_step: int,
    first_step: int,
    signal: int,
    counted_at: int = 0,
) -> SearchSteps[NonFinite]:
    """Find the parameters and ranks that held NaN or Inf at `first_step`.

    `evidence` is this rank's int64 [parameters, 4] from `nonfinite_counts`, counted at
    `evidence_step`. Only evidence from `first_step`, the earliest of all ranks, is used: later, a
    NaN is in more parameters. `counted_at`: the step in which this rank has counted, where that was
    after the step that the evidence is taken for.
    """
    mine = evidence.cpu()
    if evidence_step != first_step:
        mine = torch.zeros_like(mine)
    total = mine.clone()
    yield total, dist.ReduceOp.SUM
    affected = torch.nonzero(total.sum(1)).flatten()
    listed = affected[:MOST_PLACES]
    by_rank = ranks.table(torch.cat([mine[listed], mine.new_tensor([[counted_at, 0, 0, 0]])]))
    yield by_rank, dist.ReduceOp.SUM
    places = tuple(
        NonFinitePlace(names[param], rank, *by_rank[rank, i].tolist())
        for i, param in enumerate(listed.tolist())
        for rank in range(ranks.size)
        if by_rank[rank, i].any()
    )
    counted = int(by_rank[:, -1, 0].max())
    counted = counted if counted > first_step else 0
    return NonFinite(first_step, SIGNALS[signal], places, len(affected), counted)


@dataclass(frozen=True)
class Split:
    """Ranks that should hold equal weights and have diverged."""

    key: float
    """Region key of the replica class."""
    diverged: tuple[int, ...]
    majority: tuple[int, ...]
    tie: bool
    """Whether there was no majority."""


def find_desync(ranks: Mapping[str, Floats]) -> Split | None:
    """Return the first replica class whose ranks differ; None when all agree.

    Ranks with the same region key hold the same shards and must have the same checksum. In a tie
    the lowest rank counts as the majority.
    """
    failed = ranks["failed"]
    if len(failed) == 1:
        return None
    failed = failed != 0
    keys = np.stack([ranks[f"region_key{i}"] for i in range(REPLICA_CLASSES)], 1)
    sums = np.stack([ranks[f"checksum{i}"] for i in range(REPLICA_CLASSES)], 1)
    for key in dict.fromkeys(keys[~failed].flatten().tolist()):
        if not key:
            continue
        where = (keys == key) & ~failed[:, None]
        members = {int(rank): float(sums[rank, column]) for rank, column in np.argwhere(where)}
        votes = Counter(members.values())
        if len(votes) < 2:
            continue
        most = max(votes.values())
        winners = [value for value, count in votes.items() if count == most]
        reference = winners[0]  # Counter keeps the order of first appearance: the lowest rank's
        return Split(
            key=key,
            diverged=tuple(rank for rank, value in members.items() if value != reference),
            majority=tuple(rank for rank, value in members.items() if value == reference),
            tie=len(winners) > 1,
        )
    return None


def locate_desync(
    ranks: Ranks, plan: SamplePlan, row_checksums: torch.Tensor, found: Split
) -> SearchSteps[Desync]:
    """Find the parameters in which the diverged ranks differ from the majority."""
    checksums = row_checksums.cpu()
    mine = torch.zeros_like(checksums)
    if found.key in plan.region_keys:
        in_class = plan.replica_class.cpu() == plan.region_keys.index(int(found.key))
        mine = torch.where(in_class, checksums, mine)
    # All ranks get the checksums of the reference rank, then count the diverged ranks per row.
    reference = mine.clone() if ranks.rank == found.majority[0] else torch.zeros_like(mine)
    yield reference, dist.ReduceOp.SUM
    differs = (mine != reference).long()
    if ranks.rank not in found.diverged:
        differs.zero_()
    yield differs, dist.ReduceOp.SUM
    where = torch.nonzero(differs).flatten()[:MOST_PLACES].tolist()
    params = tuple(plan.names[i] for i in where)
    return Desync(found.diverged, found.majority[0], params, found.tie)

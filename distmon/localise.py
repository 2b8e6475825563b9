"""Naming the place: which parameter on which rank. The only collectives besides the two.

Both searches run only after every rank has seen the same reduced telemetry, which tells all of them
alike that a search is needed; so all of them enter it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from distmon.metrics import REPLICA_CLASSES
from distmon.record import Column, Desync, NonFinite, NonFinitePlace
from distmon.reduce import Ranks
from distmon.sampling import SamplePlan

MOST_PLACES = 64
SIGNALS = ("sample", "loss", "gradient norm")
"""What showed a non-finite value, by the number in the telemetry slot."""


def locate_nonfinite(
    ranks: Ranks,
    names: Sequence[str],
    evidence: torch.Tensor,
    evidence_step: int,
    first_step: int,
    signal: int,
    device: torch.device,
) -> NonFinite:
    """Name the parameters and ranks that held NaN or Inf when it was first seen.

    `evidence` is this rank's int64 [parameters, 4] from `nonfinite_counts`, taken at
    `evidence_step`; only ranks whose evidence is from `first_step`, the earliest of all, count:
    later evidence shows where it spread to, not where it came from.
    """
    if evidence_step != first_step:
        evidence = torch.zeros_like(evidence)
    mine = evidence.to(device)
    total = mine.clone()
    ranks.all_reduce(total, dist.ReduceOp.SUM)
    affected = torch.nonzero(total.sum(1)).flatten()
    listed = affected[:MOST_PLACES]
    by_rank = ranks.sum_by_rank(mine[listed]).cpu()
    places = tuple(
        NonFinitePlace(names[param], rank, *by_rank[rank, i].tolist())
        for i, param in enumerate(listed.tolist())
        for rank in range(ranks.size)
        if by_rank[rank, i].any()
    )
    return NonFinite(first_step, SIGNALS[signal], places, len(affected))


@dataclass(frozen=True)
class Split:
    """Ranks that should hold equal weights and do not."""

    key: float
    """Region key of the replica class."""
    left: tuple[int, ...]
    stayed: tuple[int, ...]
    tie: bool
    """There was no majority."""


def find_desync(ranks: Mapping[str, Column]) -> Split | None:
    """The first replica class whose ranks differ; None when all agree.

    Ranks with the same region key hold the same pieces and must have the same checksum. With a tie
    the side of the lowest rank is believed.
    """
    failed = ranks["failed"] != 0
    if len(failed) == 1:
        return None
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
        believed = winners[0]  # Counter keeps the order of first appearance: the lowest rank's
        return Split(
            key=key,
            left=tuple(rank for rank, value in members.items() if value != believed),
            stayed=tuple(rank for rank, value in members.items() if value == believed),
            tie=len(winners) > 1,
        )
    return None


def locate_desync(
    ranks: Ranks, plan: SamplePlan, row_checksums: torch.Tensor, found: Split
) -> Desync:
    """Name the parameters in which those who left differ from those who stayed."""
    mine = torch.zeros_like(row_checksums)
    if found.key in plan.region_keys:
        mine = torch.where(
            plan.replica_class == plan.region_keys.index(int(found.key)), row_checksums, mine
        )
    # Everybody learns the reference rank's checksums, then how many of those who left differ.
    reference = mine.clone() if ranks.rank == found.stayed[0] else torch.zeros_like(mine)
    ranks.all_reduce(reference, dist.ReduceOp.SUM)
    differs = (mine != reference).long()
    if ranks.rank not in found.left:
        differs.zero_()
    ranks.all_reduce(differs, dist.ReduceOp.SUM)
    where = torch.nonzero(differs).flatten()[:MOST_PLACES].tolist()
    return Desync(found.left, found.stayed[0], tuple(plan.names[i] for i in where), found.tie)

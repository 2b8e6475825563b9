"""Naming the place: which parameter on which rank. The only collectives besides the two.

Both searches run only after every rank has seen the same reduced telemetry, which tells all of them
alike that a search is needed; so all of them enter it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from distmon.record import Column, Desync, NonFinite, NonFinitePlace
from distmon.reduce import Ranks

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


def find_desync(ranks: Mapping[str, Column]) -> tuple[list[int], list[int], bool] | None:
    """Ranks that left their replicas, those they left, and whether there was no majority.

    Ranks with the same region key hold the same pieces and must have the same checksum. None when
    all do. With a tie the side of the lowest rank is believed.
    """
    keys, sums, failed = ranks["region_key"], ranks["checksum"], ranks["failed"]
    for key in dict.fromkeys(keys.tolist()):
        members = [int(r) for r in np.flatnonzero((keys == key) & (failed == 0))]
        votes = Counter(sums[members].tolist())
        if len(votes) < 2:
            continue
        most = max(votes.values())
        winners = [value for value, count in votes.items() if count == most]
        believed = winners[0]  # Counter keeps the order of first appearance: the lowest rank's
        left = [r for r in members if sums[r] != believed]
        stayed = [r for r in members if sums[r] == believed]
        return left, stayed, len(winners) > 1
    return None


def locate_desync(
    ranks: Ranks,
    names: Sequence[str],
    row_checksums: torch.Tensor,
    found: tuple[list[int], list[int], bool],
) -> Desync:
    """Name the parameters in which `left` and `stayed` differ."""
    left, stayed, tie = found
    # Everybody learns the reference rank's checksums, then how many of those who left differ.
    reference = torch.zeros_like(row_checksums)
    if ranks.rank == stayed[0]:
        reference.copy_(row_checksums)
    ranks.all_reduce(reference, dist.ReduceOp.SUM)
    differs = (row_checksums != reference).long()
    if ranks.rank not in left:
        differs.zero_()
    ranks.all_reduce(differs, dist.ReduceOp.SUM)
    where = torch.nonzero(differs).flatten()[:MOST_PLACES].tolist()
    return Desync(tuple(left), stayed[0], tuple(names[i] for i in where), tie)

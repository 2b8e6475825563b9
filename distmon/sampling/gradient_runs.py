"""Which runs of which gradients this rank reads, where they are sampled and not read whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import BY_LANE, RUN
from distmon.layout import Shard
from distmon.sampling.sample import Indices, Sample

Runs = tuple[Indices, Indices, Indices]
"""Offset in the local tensor, length and group code of each run."""


@dataclass(frozen=True)
class GradientRuns:
    """The runs of all sampled gradients, parameter after parameter, on the device."""

    first: NDArray[np.int64]
    """[parameters + 1]: the runs of parameter i are first[i] to first[i + 1]."""
    offsets: torch.Tensor
    """int32 or int64 [runs]: flat offset of the first element in the local tensor."""
    codes: torch.Tensor
    """uint8 [runs]: length - 1 in the low 3 bits, then the group of the run (0 to 7) or, with
    BY_LANE added, that of its first element."""

    @property
    def nbytes(self) -> int:
        """Device memory of the tables."""
        return sum(t.numel() * t.element_size() for t in (self.offsets, self.codes))

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [runs]"""
        return (self.codes & (RUN - 1)).long() + 1

    @property
    def groups(self) -> torch.Tensor:
        """int64 [runs]: group code of each run."""
        return (self.codes >> 3).long()


def build_gradient_runs(
    shards: Sequence[Shard], samples: Sequence[Sample | None], device: torch.device
) -> GradientRuns:
    """Lay out the runs that this rank holds; None stands for a gradient that is read whole."""
    held = [
        _none() if sample is None else _held(shard, sample)
        for shard, sample in zip(shards, samples, strict=True)
    ]
    return pack_runs(held, device)


def pack_runs(held: Sequence[Runs], device: torch.device) -> GradientRuns:
    """Put the runs of every parameter into one table on `device`."""
    first = np.cumsum([0, *(len(offsets) for offsets, _, _ in held)])
    offsets, lengths, groups = (np.concatenate(each) for each in zip(*held, strict=True))
    wide = offsets.size > 0 and offsets.max() + RUN >= 2**31
    return GradientRuns(
        first=first,
        offsets=torch.from_numpy(offsets.astype(np.int64 if wide else np.int32)).to(device),
        codes=torch.from_numpy((lengths - 1 + (groups << 3)).astype(np.uint8)).to(device),
    )


def _none() -> Runs:
    nothing = np.empty(0, dtype=np.int64)
    return nothing, nothing, nothing


def _held(shard: Shard, sample: Sample) -> Runs:
    """Return the runs of the sample that lie here, those that a shard boundary cuts in parts."""
    starts = sample.starts
    lengths, groups = sample.lengths(starts), sample.groups(len(starts))
    if sample.by_lane and not sample.whole:
        groups = groups + BY_LANE
    here = shard.region.may_hold(starts, starts + lengths)
    starts, lengths, groups = starts[here], lengths[here], groups[here]
    first, last = shard.region.local(starts), shard.region.local(starts + lengths - 1)
    unbroken = (first >= 0) & (last - first == lengths - 1)
    cut = ~unbroken
    parts = _parts(shard, starts[cut], lengths[cut], groups[cut])
    whole = (first[unbroken], lengths[unbroken], groups[unbroken])
    offsets, lengths, groups = (np.concatenate(pair) for pair in zip(whole, parts, strict=True))
    return offsets, lengths, groups


def _parts(shard: Shard, starts: Indices, lengths: Indices, groups: Indices) -> Runs:
    """Return the neighboring elements of each run that lie here, as runs of their own."""
    lanes = np.arange(RUN)
    local = shard.region.local((starts[:, None] + lanes).reshape(-1)).reshape(-1, RUN)
    return cut_runs(np.where(lanes < lengths[:, None], local, -1), groups)


def cut_runs(local: Indices, groups: Indices) -> Runs:
    """Cut runs where their elements are not neighbors.

    `local` is [runs, RUN]: the offset of each element, -1 where there is none; `groups` the group
    code of each run.
    """
    follows = np.zeros(local.shape, dtype=bool)
    follows[:, 1:] = (local[:, 1:] == local[:, :-1] + 1) & (local[:, :-1] >= 0)
    begins = (local >= 0) & ~follows
    run, lane = np.nonzero(begins)
    part = (np.cumsum(begins) - 1)[(local >= 0).reshape(-1)]
    length = np.bincount(part, minlength=len(run))
    group = np.where(groups[run] >= BY_LANE, groups[run] + lane, groups[run])
    return local[run, lane], length, group

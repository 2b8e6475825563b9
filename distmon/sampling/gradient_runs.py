"""Which runs of which gradients this rank reads, where they are sampled and not read whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import BY_LANE, RUN
from distmon.layout import Shard
from distmon.sampling.batches import Batch, batches
from distmon.sampling.sample import Indices
from distmon.sampling.samples import Samples

Runs = tuple[Indices, Indices, Indices]
"""Offset in the local tensor, length and group code of each run."""
Codes = NDArray[np.uint8]
"""As in `GradientRuns.codes`."""


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
    shards: Sequence[Shard], samples: Samples, rows: Iterable[int], device: torch.device
) -> GradientRuns:
    """Lay out the runs that this rank holds of the parameters `rows`; others are read whole."""
    pieces: list[tuple[Indices, Indices, Indices, Codes]] = []
    counts = np.zeros(len(shards), dtype=np.int64)
    for batch in batches(shards, samples, rows):
        for which, (offsets, lengths, groups) in _held(batch):
            held = np.bincount(which, minlength=len(batch.rows))
            counts[batch.rows] += held
            pieces.append((batch.rows, held, offsets, _codes(lengths, groups)))
    first = np.concatenate(([0], np.cumsum(counts)))
    free = first[:-1].copy()
    all_offsets = np.empty(first[-1], dtype=np.int64)
    all_codes = np.empty(first[-1], dtype=np.uint8)
    for some, held, offsets, codes in pieces:
        # The runs of a piece lie in the order of its parameters.
        within = np.arange(len(offsets)) - np.repeat(np.cumsum(held) - held, held)
        places = np.repeat(free[some], held) + within
        free[some] += held
        all_offsets[places], all_codes[places] = offsets, codes
    return _on_device(first, all_offsets, all_codes, device)


def pack_runs(held: Sequence[Runs], device: torch.device) -> GradientRuns:
    """Put the runs of every parameter into one table on `device`."""
    first = np.cumsum([0, *(len(offsets) for offsets, _, _ in held)])
    offsets, lengths, groups = (np.concatenate(each) for each in zip(*held, strict=True))
    return _on_device(first, offsets, _codes(lengths, groups), device)


def _codes(lengths: Indices, groups: Indices) -> Codes:
    return (lengths - 1 + (groups << 3)).astype(np.uint8)


def _on_device(
    first: Indices, offsets: Indices, codes: Codes, device: torch.device
) -> GradientRuns:
    wide = offsets.size > 0 and offsets.max() + RUN >= 2**31
    return GradientRuns(
        first=first,
        offsets=torch.from_numpy(offsets.astype(np.int64 if wide else np.int32)).to(device),
        codes=torch.from_numpy(codes).to(device),
    )


def _held(batch: Batch) -> Iterator[tuple[Indices, Runs]]:
    """Yield the runs that lie here, those that a shard boundary cuts in parts of their own.

    With the number of the parameter in the batch for each of them, which rises.
    """
    drawn, sample, region = batch.draw(), batch.sample, batch.region
    code = sample.groups(drawn.numbers) + (BY_LANE if sample.by_lane else 0)
    begin, end = region.bounds(sample.numel)
    which, run = np.nonzero((drawn.starts < end) & (drawn.starts + drawn.lengths > begin))
    starts, lengths, groups = drawn.starts[which, run], drawn.lengths[which, run], code[run]
    first, last = region.local(starts), region.local(starts + lengths - 1)
    unbroken = (first >= 0) & (last - first == lengths - 1)
    yield which[unbroken], (first[unbroken], lengths[unbroken], groups[unbroken])
    cut = np.flatnonzero(~unbroken)
    if cut.size:
        lanes = np.arange(RUN)
        elements = starts[cut, None] + lanes
        local = region.local(elements.reshape(-1)).reshape(elements.shape)
        parent, parts = _cut(np.where(lanes < lengths[cut, None], local, -1), groups[cut])
        yield which[cut][parent], parts


def cut_runs(local: Indices, groups: Indices) -> Runs:
    """Cut runs where their elements are not neighbors.

    `local` is [runs, RUN]: the offset of each element, -1 where there is none; `groups` the group
    code of each run.
    """
    return _cut(local, groups)[1]


def _cut(local: Indices, groups: Indices) -> tuple[Indices, Runs]:
    """Return which run each part comes from, and the parts."""
    follows = np.zeros(local.shape, dtype=bool)
    follows[:, 1:] = (local[:, 1:] == local[:, :-1] + 1) & (local[:, :-1] >= 0)
    begins = (local >= 0) & ~follows
    run, lane = np.nonzero(begins)
    part = (np.cumsum(begins) - 1)[(local >= 0).reshape(-1)]
    length = np.bincount(part, minlength=len(run))
    group = np.where(groups[run] >= BY_LANE, groups[run] + lane, groups[run])
    return run, (local[run, lane], length, group)

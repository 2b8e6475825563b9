"""Where the sampled weights lie in the local tensors, and which rows are processed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS
from distmon.layout import Shard
from distmon.sampling.batches import Batch, batches
from distmon.sampling.sample import Indices
from distmon.sampling.samples import Samples

# Rows of one chunk are processed together; 2**17 elements of float32 stay in a core's cache.
CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class LocalOffsets:
    """Local offsets of the samples; those of parameter i begin at `first[i]`, group by group."""

    counts: NDArray[np.int32]
    """[parameters, GROUPS]"""
    first: Indices
    """[parameters]"""
    offsets: NDArray[np.signedinteger]
    """int32, or int64 where a local tensor is longer than that can say."""

    @property
    def widths(self) -> NDArray[np.int32]:
        """[parameters]: slots of each group; 0 where nothing is held here."""
        return np.asarray(self.counts.max(1, initial=0))

    def table(
        self, rows: Indices, width: int
    ) -> tuple[NDArray[np.signedinteger], NDArray[np.int32]]:
        """Return [rows, GROUPS, width] offsets, 0 in unused slots, and the used slots by group."""
        counts = self.counts[rows]
        first = self.first[rows][:, None] + np.cumsum(counts, axis=1) - counts
        slots = np.arange(width)
        used = slots < counts[:, :, None]
        places = np.where(used, first[:, :, None] + slots, 0)
        return np.where(used, self.offsets[places], 0).astype(self.offsets.dtype), counts


def place(shards: Sequence[Shard], samples: Samples) -> LocalOffsets:
    """Find the samples in the local tensors of this rank."""
    counts = np.zeros((len(shards), GROUPS), dtype=np.int32)
    first = np.zeros(len(shards), dtype=np.int64)
    found: list[NDArray[np.signedinteger]] = []
    size = 0
    for batch in batches(shards, samples, range(len(shards))):
        offsets, held = _placed(batch)
        counts[batch.rows] = held
        each = held.sum(1)
        first[batch.rows] = size + np.cumsum(each) - each
        size += len(offsets)
        narrow = batch.sample.numel < 2**31
        found.append(offsets.astype(np.int32 if narrow else np.int64))
    empty = np.zeros(0, dtype=np.int32)
    return LocalOffsets(counts, first, np.concatenate(found) if found else empty)


def _placed(batch: Batch) -> tuple[Indices, Indices]:
    """Return the local offsets, by parameter and then by group, and [parameters, GROUPS] counts."""
    runs, sample = batch.draw(), batch.sample
    lanes = np.arange(sample.run)
    elements = runs.starts[:, :, None] + lanes
    local = batch.region.local(elements.reshape(-1)).reshape(elements.shape)
    here = (local >= 0) & (lanes < runs.lengths[:, :, None])
    groups = np.repeat(sample.groups(runs.numbers)[:, None], sample.run, axis=1)
    if sample.by_lane:
        groups = groups + lanes
    many = len(batch.rows)
    regular = np.arange(len(runs.numbers)) % GROUPS
    if here.all() and len(regular) % GROUPS == 0 and (groups == regular[:, None]).all():
        placed = local.reshape(many, -1, GROUPS, sample.run).transpose(0, 2, 1, 3)
        each = len(regular) // GROUPS * sample.run
        return placed.reshape(-1), np.full((many, GROUPS), each)
    key = (np.arange(many)[:, None, None] * GROUPS + groups)[here]
    order = np.argsort(key, kind="stable")
    counts = np.bincount(key, minlength=many * GROUPS)
    return local[here][order], counts.reshape(many, GROUPS)


def share_chunks(widths: NDArray[np.int32]) -> Iterator[tuple[Indices, int]]:
    """Yield the rows and the width of each chunk; rows without samples are in none.

    Rows of similar width share a chunk, so that padding stays small.
    """
    order = np.argsort(-widths, kind="stable")[: int((widths > 0).sum())]
    falling = widths[order]
    done = 0
    while done < len(order):
        width = int(falling[done])
        similar = int(np.searchsorted(-falling, -3 * width / 4, side="right"))
        end = min(similar, done + max(1, CHUNK_ELEMENTS // (GROUPS * width)))
        yield order[done:end], width
        done = end

"""Where the sampled elements lie on this rank: the tables that a probe reads by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS
from distmon.layout import Shard
from distmon.sampling.designs import gradient_samples, weight_samples, whole_sample
from distmon.sampling.gradient_runs import GradientRuns, build_gradient_runs
from distmon.sampling.reading import Reading
from distmon.sampling.sample import Sample, hash48

# Rows of one chunk are processed together; 2**17 elements of float32 stay in a core's cache.
CHUNK_ELEMENTS = 1 << 17
REPLICA_CLASSES = 4
"""Ways of sharding within one model whose replicas are compared separately."""


@dataclass(frozen=True)
class Chunk:
    """Rows that are gathered and reduced together, each as [GROUPS, width] slots.

    All tensors but `padding` are views of the plan's tables. `offsets` are flat offsets into the
    local tensor; `padding` marks the slots that hold nothing (None when all are used); `snapshot`
    keeps the samples from just before the step.
    """

    rows: NDArray[np.int64]
    width: int
    offsets: torch.Tensor
    padding: torch.Tensor | None
    snapshot: torch.Tensor
    group_counts: torch.Tensor
    """int32 [rows, GROUPS]: used slots of each group; they come first."""
    half_ulp: torch.Tensor
    """float64 [rows]: half a unit in the last place of 1.0 in the row's weight dtype."""


@dataclass(frozen=True)
class SamplePlan:
    """The tables of one rank on one device."""

    names: tuple[str, ...]
    reading: Reading
    samples: tuple[Sample, ...]
    """Of weights and updates, and of gradients for their histogram."""
    gradient_samples: tuple[Sample, ...]
    """Of gradients, for their moments and extremes."""
    gradient_runs: GradientRuns
    """Where the sampled gradients are here; those that are read whole have no runs."""
    offsets: torch.Tensor
    """Flat: the slots of all rows that have something here, chunk after chunk."""
    snapshot: torch.Tensor
    """Flat, beside `offsets`."""
    chunks: tuple[Chunk, ...]
    device: torch.device
    dtype: torch.dtype
    """float32, or float64 when a weight is: what samples are held in."""
    plan_hash: int
    """48 bits; equal on two ranks exactly when they sample the same elements."""
    region_keys: tuple[int, ...]
    """48 bits by replica class; equal on two ranks that hold the same pieces, 0 without a piece."""
    replica_class: torch.Tensor
    """int64 [parameters]: index into `region_keys`."""

    @property
    def nbytes(self) -> int:
        """Device memory of snapshot and tables."""
        tables = [self.offsets, self.snapshot]
        for c in self.chunks:
            tables += [c.group_counts, c.half_ulp, *([] if c.padding is None else [c.padding])]
        return sum(t.numel() * t.element_size() for t in tables) + self.gradient_runs.nbytes

    def describe(self) -> dict[str, Any]:
        """Return how much of every tensor is read, as plain values over all ranks."""
        return {
            "text": self.reading.text,
            "elements": sum(sample.numel for sample in self.samples),
            "sampled_elements": sum(sample.count for sample in self.samples),
            "gradient_elements": sum(sample.count for sample in self.gradient_samples),
            "gradient_read_seconds": self.reading.seconds,
        }

    @property
    def whole_weights(self) -> list[int]:
        """Parameters whose weight is read whole, beyond what their sample reads anyway."""
        if not self.reading.whole_weights:
            return []
        return [i for i, sample in enumerate(self.samples) if not sample.whole]

    @property
    def whole_gradients(self) -> list[int]:
        """Parameters whose gradient is read whole, beyond what their sample reads anyway."""
        both = enumerate(zip(self.samples, self.gradient_samples, strict=True))
        return [i for i, (sample, gradient) in both if gradient.whole and not sample.whole]


def build_plan(
    shards: Sequence[Shard], reading: Reading, seed: int, device: torch.device
) -> SamplePlan:
    """Choose every sample and lay out the part that this rank holds."""
    names, shapes = [s.name for s in shards], [s.global_shape for s in shards]
    samples = [*weight_samples(names, shapes, reading.sample_size, seed)]
    of_gradients = [*gradient_samples(names, shapes, seed)]
    for i, shard in enumerate(shards):
        everything = whole_sample(shard.name, shard.numel, seed)
        if reading.whole_weights and shard.may_be_partial:
            samples[i] = of_gradients[i] = everything
        elif reading.whole_gradients and not shard.may_be_partial:
            # A gradient that is still to be added over ranks travels element by element.
            of_gradients[i] = everything
    sampled = [
        None if gradient.whole or shard.may_be_partial else gradient
        for shard, gradient in zip(shards, of_gradients, strict=True)
    ]
    placed = [_place(shard, sample) for shard, sample in zip(shards, samples, strict=True)]
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in shards) else torch.float32
    tables = _share_chunks(placed)
    flat = np.concatenate([t.reshape(-1) for _, t in tables] or [np.empty(0, dtype=np.int64)])
    index_dtype = np.int32 if flat.size == 0 or flat.max() < 2**31 else np.int64
    offsets = torch.from_numpy(np.maximum(flat, 0).astype(index_dtype)).to(device)
    snapshot = torch.zeros(flat.size, dtype=dtype, device=device)
    chunks: list[Chunk] = []
    begin = 0
    for rows, table in tables:
        end = begin + table.size
        views = (offsets[begin:end], snapshot[begin:end])
        chunks.append(_chunk(rows, table, *views, [shards[r].dtype for r in rows]))
        begin = end
    what = [
        f"{s.name}{s.global_shape}{x.expansion}{x.count}{g.expansion}{g.count}"
        for s, x, g in zip(shards, samples, of_gradients, strict=True)
    ]
    keys, classes = _replica_classes(shards)
    return SamplePlan(
        names=tuple(names),
        reading=reading,
        samples=tuple(samples),
        gradient_samples=tuple(of_gradients),
        gradient_runs=build_gradient_runs(shards, sampled, device),
        offsets=offsets,
        snapshot=snapshot,
        chunks=tuple(chunks),
        device=device,
        dtype=dtype,
        plan_hash=hash48(f"{seed}{reading.text}", *what),
        region_keys=keys,
        replica_class=torch.from_numpy(classes).to(device),
    )


def _share_chunks(
    placed: Sequence[NDArray[np.int64]],
) -> list[tuple[list[int], NDArray[np.int64]]]:
    """Return the rows and the stacked table of each chunk.

    Rows of similar width share a chunk, so that padding stays small.
    """
    order = sorted((i for i, p in enumerate(placed) if p.size), key=lambda i: -placed[i].shape[1])
    widths = np.array([placed[row].shape[1] for row in order], dtype=np.int64)
    tables: list[tuple[list[int], NDArray[np.int64]]] = []
    done = 0
    while done < len(order):
        width = int(widths[done])
        similar = int(np.searchsorted(-widths, -3 * width / 4, side="right"))
        end = min(similar, done + max(1, CHUNK_ELEMENTS // (GROUPS * width)))
        rows = order[done:end]
        tables.append((rows, _stack([placed[row] for row in rows], width)))
        done = end
    return tables


def _replica_classes(shards: Sequence[Shard]) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    """Split the shards by how they are spread over ranks; a key and the class of each.

    A model may be sharded in one part and replicated in another, and only what is replicated over
    the same ranks can be compared as one. Beyond REPLICA_CLASSES ways to spread the rest share the
    last class: what they hold is compared less often, never wrongly.
    """
    held = sorted({s.sharding for s in shards if s.parameters})
    number = {spread: min(i, REPLICA_CLASSES - 1) for i, spread in enumerate(held)}
    members: list[list[str]] = [[] for _ in range(REPLICA_CLASSES)]
    classes = np.zeros(len(shards), dtype=np.int64)
    for i, shard in enumerate(shards):
        if shard.parameters:
            classes[i] = number[shard.sharding]
            members[classes[i]].append(f"{shard.name}:{shard.region.key()}")
    return tuple(hash48(*texts) if texts else 0 for texts in members), classes


def _place(shard: Shard, sample: Sample) -> NDArray[np.int64]:
    """Local offsets as [GROUPS, width], -1 in unused slots; size 0 when nothing is held here."""
    local = shard.region.local(sample.indices)
    slots = np.flatnonzero(local >= 0)
    if not slots.size:
        return np.empty((GROUPS, 0), dtype=np.int64)
    group = sample.element_groups[slots]
    counts = np.bincount(group, minlength=GROUPS)
    placed = np.full((GROUPS, int(counts.max())), -1, dtype=np.int64)
    for g in range(GROUPS):
        placed[g, : counts[g]] = local[slots[group == g]]
    return placed


def _stack(placed: list[NDArray[np.int64]], width: int) -> NDArray[np.int64]:
    """[rows, GROUPS, width], -1 in unused slots."""
    table = np.full((len(placed), GROUPS, width), -1, dtype=np.int64)
    for i, row in enumerate(placed):
        table[i, :, : row.shape[1]] = row
    return table


def _chunk(
    rows: list[int],
    table: NDArray[np.int64],
    offsets: torch.Tensor,
    snapshot: torch.Tensor,
    dtypes: list[torch.dtype],
) -> Chunk:
    device = offsets.device
    count, _, width = table.shape
    shape = (count, GROUPS * width)
    unused = table < 0
    half_ulp = [torch.finfo(dtype).eps / 2 for dtype in dtypes]
    return Chunk(
        rows=np.asarray(rows, dtype=np.int64),
        width=width,
        offsets=offsets.view(shape),
        padding=torch.from_numpy(unused.reshape(shape)).to(device) if unused.any() else None,
        snapshot=snapshot.view(shape),
        group_counts=torch.from_numpy((~unused).sum(2).astype(np.int32)).to(device),
        half_ulp=torch.tensor(half_ulp, dtype=torch.float64).to(device),
    )

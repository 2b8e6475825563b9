"""Where the sampled elements lie on this rank: the tables that a probe reads by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, bin_words
from distmon.layout import Shard
from distmon.sampling.designs import gradient_samples, weight_samples, whole_sample
from distmon.sampling.gradient_runs import GradientRuns, build_gradient_runs
from distmon.sampling.local_offsets import place, share_chunks
from distmon.sampling.reading import Reading
from distmon.sampling.sample import REPLICA_CLASSES, Sample, hash48, hash48_of
from distmon.sampling.sample_numbers import SampleNumbers


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
    numbers: SampleNumbers
    """Of `samples`."""
    gradient_samples: tuple[Sample, ...]
    """Of gradients, for their moments and extremes."""
    gradient_numbers: SampleNumbers
    """Of `gradient_samples`."""
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
            "sampled_elements": int(self.numbers.count.sum()),
            "gradient_elements": int(self.gradient_numbers.count.sum()),
            "gradient_read_seconds": self.reading.seconds,
        }

    def bin_words(self, copies: int) -> int:
        """Return the words that the bins of a row are packed into.

        `copies`: ranks that hold the same element of a parameter, on average over its elements.
        """
        counted = self.numbers.count
        if self.reading.whole_weights:  # so are the bins
            counted = np.array([sample.numel for sample in self.samples])
        # Twice: one part of a parameter may be on more ranks than another.
        return bin_words(2 * copies * int(counted.max(initial=0)))

    @property
    def whole_weights(self) -> list[int]:
        """Parameters whose weight is read whole, beyond what their sample reads anyway."""
        if not self.reading.whole_weights:
            return []
        return np.flatnonzero(~self.numbers.whole).tolist()

    @property
    def whole_gradients(self) -> list[int]:
        """Parameters whose gradient is read whole, beyond what their sample reads anyway."""
        return np.flatnonzero(self.gradient_numbers.whole & ~self.numbers.whole).tolist()


def build_plan(
    shards: Sequence[Shard], reading: Reading, seed: int, device: torch.device
) -> SamplePlan:
    """Choose every sample and lay out the part that this rank holds."""
    names, shapes = [s.name for s in shards], [s.global_shape for s in shards]
    samples = [*weight_samples(names, shapes, reading.sample_size, seed)]
    of_gradients = [*gradient_samples(names, shapes, seed)]
    if reading.whole_gradients:
        for i, shard in enumerate(shards):
            if not shard.may_be_partial:
                of_gradients[i] = whole_sample(shard.name, shard.numel, seed)
            elif reading.whole_weights:
                # A gradient that is still to be added over ranks travels element by element.
                samples[i] = of_gradients[i] = whole_sample(shard.name, shard.numel, seed)
    sampled = {
        i: gradient
        for i, (shard, gradient) in enumerate(zip(shards, of_gradients, strict=True))
        if not (gradient.whole or shard.may_be_partial)
    }
    numbers, gradient_numbers = SampleNumbers.of(samples), SampleNumbers.of(of_gradients)
    what = zip(
        names,
        shapes,
        *(x.tolist() for n in (numbers, gradient_numbers) for x in (n.expansion, n.count)),
        strict=True,
    )
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in shards) else torch.float32
    offsets, snapshot, chunks = _tables(shards, samples, dtype, device)
    keys, classes = _replica_classes(shards)
    return SamplePlan(
        names=tuple(names),
        reading=reading,
        samples=tuple(samples),
        numbers=numbers,
        gradient_samples=tuple(of_gradients),
        gradient_numbers=gradient_numbers,
        gradient_runs=build_gradient_runs(shards, sampled, device),
        offsets=offsets,
        snapshot=snapshot,
        chunks=chunks,
        device=device,
        dtype=dtype,
        plan_hash=hash48_of(chain((f"{seed}{reading.text}",), map(str, what))),
        region_keys=keys,
        replica_class=torch.from_numpy(classes).to(device),
    )


def _tables(
    shards: Sequence[Shard], samples: Sequence[Sample], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[Chunk, ...]]:
    """Return offsets and snapshot of all rows that have something here, and their chunks."""
    placed = place(shards, samples)
    rows_of = [*share_chunks(placed.widths)]
    slots = [len(rows) * GROUPS * width for rows, width in rows_of]
    host = np.empty(sum(slots), dtype=placed.offsets.dtype)
    offsets = torch.from_numpy(host).to(device)
    snapshot = torch.zeros(len(host), dtype=dtype, device=device)
    ulps = {dtype: torch.finfo(dtype).eps / 2 for dtype in {s.dtype for s in shards}}
    half_ulp = np.array([ulps[s.dtype] for s in shards])
    chunks: list[Chunk] = []
    begin = 0
    for (rows, width), size in zip(rows_of, slots, strict=True):
        table, counts = placed.table(rows, width)
        shape = (len(rows), GROUPS * width)
        there = offsets[begin : begin + size].view(shape)
        there.copy_(torch.from_numpy(table.reshape(shape)))
        unused = np.arange(width) >= counts[:, :, None]
        padding = torch.from_numpy(unused.reshape(shape)).to(device) if unused.any() else None
        chunks.append(
            Chunk(
                rows=rows,
                width=width,
                offsets=there,
                padding=padding,
                snapshot=snapshot[begin : begin + size].view(shape),
                group_counts=torch.from_numpy(counts.astype(np.int32)).to(device),
                half_ulp=torch.from_numpy(half_ulp[rows]).to(device),
            )
        )
        begin += size
    return offsets, snapshot, tuple(chunks)


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

"""Where the sampled elements lie on this rank: the tables that a probe reads by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
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
from distmon.sampling.sample import REPLICA_CLASSES, hash48_of
from distmon.sampling.sample_numbers import SampleNumbers
from distmon.sampling.samples import Samples


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
    samples: Samples
    """Of weights and updates, and of gradients for their histogram."""
    numbers: SampleNumbers
    """Of `samples`."""
    gradient_samples: Samples
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
        tables = [self.snapshot, self.offsets]
        for c in self.chunks:
            tables += [c.group_counts, c.half_ulp, *([] if c.padding is None else [c.padding])]
        here = sum(table.nbytes for table in tables if not table.is_meta)
        return here + self.gradient_runs.nbytes

    def without_slots(self) -> SamplePlan:
        """Return the plan for a probe with a table of slots of its own: here, only their shapes."""
        chunks = (
            replace(
                chunk,
                offsets=chunk.offsets.to("meta"),
                padding=None if chunk.padding is None else chunk.padding.to("meta"),
            )
            for chunk in self.chunks
        )
        return replace(self, offsets=self.offsets.to("meta"), chunks=tuple(chunks))

    def describe(self) -> dict[str, Any]:
        """Return how much of every tensor is read, as plain values over all ranks."""
        return {
            "text": self.reading.text,
            "elements": sum(like.numel for like in self.samples.designs),
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
            counted = np.array([like.numel for like in self.samples.designs])
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
    names, shapes = tuple(s.name for s in shards), [s.global_shape for s in shards]
    samples = weight_samples(names, shapes, reading.sample_size, seed)
    of_gradients = gradient_samples(names, shapes, seed)
    if reading.whole_gradients:
        whole = {shape: whole_sample("", prod(shape), seed) for shape in {*shapes}}
        for i, shard in enumerate(shards):
            if not shard.may_be_partial:
                of_gradients.designs[i] = whole[shapes[i]]
            elif reading.whole_weights:
                # A gradient that is still to be added over ranks travels element by element.
                samples.designs[i] = of_gradients.designs[i] = whole[shapes[i]]
    numbers, gradient_numbers = SampleNumbers.of(samples), SampleNumbers.of(of_gradients)
    partial = np.array([s.may_be_partial for s in shards])
    sampled = np.flatnonzero(~(gradient_numbers.whole | partial)).tolist()
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in shards) else torch.float32
    offsets, snapshot, chunks = _tables(shards, samples, dtype, device)
    keys, classes = _replica_classes(shards)
    return SamplePlan(
        names=names,
        reading=reading,
        samples=samples,
        numbers=numbers,
        gradient_samples=of_gradients,
        gradient_numbers=gradient_numbers,
        gradient_runs=build_gradient_runs(shards, of_gradients, sampled, device),
        offsets=offsets,
        snapshot=snapshot,
        chunks=chunks,
        device=device,
        dtype=dtype,
        plan_hash=_plan_hash(f"{seed}{reading.text}", names, shapes, numbers, gradient_numbers),
        region_keys=keys,
        replica_class=torch.from_numpy(classes).to(device),
    )


def _plan_hash(
    what: str, names: Sequence[str], shapes: Sequence[tuple[int, ...]], *numbers: SampleNumbers
) -> int:
    # Each number becomes an object of Python only when it is its turn.
    columns = (x.data for n in numbers for x in (n.expansion, n.count))
    return hash48_of(chain((what,), map(str, zip(names, shapes, *columns, strict=True))))


def _tables(
    shards: Sequence[Shard], samples: Samples, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[Chunk, ...]]:
    """Return offsets and snapshot of all rows that have something here, and their chunks."""
    placed = place(shards, samples)
    rows_of = [*share_chunks(placed.widths)]
    slots = [len(rows) * GROUPS * width for rows, width in rows_of]
    numbers = torch.int64 if placed.offsets.itemsize == 8 else torch.int32
    offsets = torch.empty(sum(slots), dtype=numbers, device=device)
    snapshot = torch.zeros(len(offsets), dtype=dtype, device=device)
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
                group_counts=torch.from_numpy(counts).to(device),
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
    held = sorted({s.sharding for s in shards if s.parameter is not None})
    number = {spread: min(i, REPLICA_CLASSES - 1) for i, spread in enumerate(held)}
    classes = np.array([number.get(s.sharding, 0) for s in shards], dtype=np.int64)
    keys = [0] * REPLICA_CLASSES
    for kind in {*number.values()}:
        members = (
            shard
            for shard, its in zip(shards, classes.data, strict=True)
            if its == kind and shard.parameter is not None
        )
        keys[kind] = hash48_of(f"{shard.name}:{shard.region.key()}" for shard in members)
    return tuple(keys), classes

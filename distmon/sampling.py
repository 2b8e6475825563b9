"""Which elements of each parameter are read, and where they lie on this rank.

The sample is chosen in the index space of the unsharded parameter from its name and a seed, so it
is the same on every rank, under every sharding and after every resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, RUN
from distmon.layout import Shard
from distmon.metrics import REPLICA_CLASSES

# Rows of one chunk are processed together; 2**17 elements of float32 stay in a core's cache.
CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Sample:
    """Which elements of one parameter are read; slot s is element s % 8 of run s // 8.

    The indices are computed when asked for: kept for every parameter they would be 8 KB each, on
    every rank.
    """

    name: str
    numel: int
    runs: int
    """Runs to read; more than the parameter has when it is read whole."""
    seed: int
    count: int
    """Elements in the sample."""

    @property
    def whole(self) -> bool:
        """Whether every element is read, so that nothing is estimated."""
        return self.numel <= self.runs * RUN

    @property
    def expansion(self) -> float:
        """A sum over the sample times this is an unbiased estimate of the sum over all elements."""
        return 1.0 if self.whole else -(-self.numel // RUN) / self.runs

    @property
    def indices(self) -> NDArray[np.int64]:
        """Flat indices into the unsharded parameter, in slot order."""
        if self.whole:
            return np.arange(self.numel, dtype=np.int64)
        starts = _run_numbers(self.name, self.numel, self.runs, self.seed, 0) * RUN
        return (starts[:, None] + np.arange(RUN)).reshape(-1)[: self.count]


def choose(name: str, numel: int, sample_size: int, seed: int) -> Sample:
    """Pick about `sample_size` elements of a parameter with `numel`.

    The flattened parameter is cut into aligned runs of 8 and into as many equal strata as runs are
    wanted; stratum k contributes the run under a uniformly chosen point of it. The points have the
    same density everywhere, so every run is equally likely to be read and sums are unbiased.
    """
    runs = -(-sample_size // RUN)
    count = min(numel, runs * RUN)
    if numel > count:
        # Only the very last run of a parameter may have fewer than 8 elements.
        last = int(_run_numbers(name, numel, runs, seed, runs - 1)[0])
        count = (runs - 1) * RUN + min(RUN, numel - last * RUN)
    return Sample(name, numel, runs, seed, count)


def _run_numbers(name: str, numel: int, runs: int, seed: int, first: int) -> NDArray[np.int64]:
    """The runs that the strata from `first` on contribute."""
    available = -(-numel // RUN)
    stratum = np.arange(first, runs, dtype=np.float64)
    points = (stratum + _uniform(name, seed, first, runs)) * (available / runs)
    # Rounding must not carry a point beyond its stratum, least of all into the short last run.
    last = np.where(stratum < runs - 1, available - 2, available - 1)
    return np.minimum(points.astype(np.int64), last)


def _uniform(name: str, seed: int, first: int, end: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) by name, seed and place in the sequence only (splitmix64)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = np.uint64(int.from_bytes(digest, "little")) + golden * np.arange(
            first + 1, end + 1, dtype=np.uint64
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


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
    samples: tuple[Sample, ...]
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
        return sum(t.numel() * t.element_size() for t in tables)


def build_plan(
    shards: Sequence[Shard],
    sample_size: int,
    seed: int,
    device: torch.device,
    exact: bool = False,
) -> SamplePlan:
    """Choose every sample and lay out the part that this rank holds.

    `exact`: weights and gradients will be read whole beside the sample. Gradients that have to be
    added over ranks can only travel as a sample, so theirs is everything then.
    """
    samples = tuple(
        choose(s.name, s.numel, s.numel if exact and s.may_be_addend else sample_size, seed)
        for s in shards
    )
    placed = [_place(shard, sample) for shard, sample in zip(shards, samples, strict=True)]
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in shards) else torch.float32
    # Rows of similar width share a chunk, so that padding stays small.
    order = sorted((i for i, p in enumerate(placed) if p.size), key=lambda i: -placed[i].shape[1])
    tables: list[tuple[list[int], NDArray[np.int64]]] = []
    while order:
        width = placed[order[0]].shape[1]
        taken = max(1, CHUNK_ELEMENTS // (GROUPS * width))
        tables.append((order[:taken], _stack([placed[row] for row in order[:taken]], width)))
        order = order[taken:]
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
        f"{s.name}{s.global_shape}{x.expansion}{x.count}"
        for s, x in zip(shards, samples, strict=True)
    ]
    keys, classes = _replica_classes(shards)
    return SamplePlan(
        names=tuple(s.name for s in shards),
        samples=samples,
        offsets=offsets,
        snapshot=snapshot,
        chunks=tuple(chunks),
        device=device,
        dtype=dtype,
        plan_hash=hash48(f"{seed}", *what),
        region_keys=keys,
        replica_class=torch.from_numpy(classes).to(device),
    )


def _replica_classes(shards: Sequence[Shard]) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    """Split the shards by how they are spread over ranks; a key and the class of each.

    A model may be sharded in one part and replicated in another, and only what is replicated over
    the same ranks can be compared as one. Beyond REPLICA_CLASSES ways to spread the rest share the
    last class: what they hold is compared less often, never wrongly.
    """
    held = sorted({s.spread for s in shards if s.parameters})
    number = {spread: min(i, REPLICA_CLASSES - 1) for i, spread in enumerate(held)}
    members: list[list[str]] = [[] for _ in range(REPLICA_CLASSES)]
    classes = np.zeros(len(shards), dtype=np.int64)
    for i, shard in enumerate(shards):
        if shard.parameters:
            classes[i] = number[shard.spread]
            members[classes[i]].append(f"{shard.name}:{shard.region.key()}")
    return tuple(hash48(*texts) if texts else 0 for texts in members), classes


def hash48(*texts: str) -> int:
    """A hash that a float64 holds exactly."""
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def _place(shard: Shard, sample: Sample) -> NDArray[np.int64]:
    """Local offsets as [GROUPS, width], -1 in unused slots; size 0 when nothing is held here."""
    local = shard.region.local(sample.indices)
    slots = np.flatnonzero(local >= 0)
    if not slots.size:
        return np.empty((GROUPS, 0), dtype=np.int64)
    group = slots // RUN % GROUPS
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

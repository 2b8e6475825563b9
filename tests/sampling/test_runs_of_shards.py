"""Runs of gradients on every rank: together the global sample, in the groups that it says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from given_shard import given_shard

from csrc_triton.row_layout import BY_LANE, RUN
from distmon.layout.shard import EMPTY_REGION, Box, Everything, FlatRange, Region
from distmon.probe.strided_runs import runs_in_memory
from distmon.sampling.designs import gradient_samples
from distmon.sampling.gradient_runs import GradientRuns, build_gradient_runs
from distmon.sampling.sample import Sample
from distmon.sampling.samples import Samples

CPU = torch.device("cpu")
SHAPES = {
    "every row, by lane": (4100, 1101),
    "every column": (20, 4501),
    "spread evenly": (130, 77),
    "odd shape": (9, 2001),
    "three dimensions": (70, 13, 11),
}


def _regions(kind: str, shape: tuple[int, ...]) -> list[tuple[Region, np.ndarray]]:
    """Region and global indices, in local order, of the shard on each rank."""
    numel = prod(shape)
    everything = np.arange(numel)
    if kind == "everything":
        return [(Everything(), everything), (EMPTY_REGION, everything[:0])]
    if kind == "flat":  # boundaries in the middle of runs
        cuts = [0, numel // 3 + 3, numel // 3 + 4, numel // 2 + 5, numel]
        return [(FlatRange(a, b), everything[a:b]) for a, b in pairwise(cuts)]
    halves = [(0, shape[-1] // 2 + 3), (shape[-1] // 2 + 3, shape[-1])]
    if kind == "slivers":  # columns narrower than a run
        halves = [(0, 3), (3, 5), (5, shape[-1])]
    result = []
    for first, last in halves:
        offset = (0,) * (len(shape) - 1) + (first,)
        size = (*shape[:-1], last - first)
        held = everything.reshape(shape)[..., first:last].reshape(-1)
        result.append((Box(shape, offset, size), held))
    return result


def _sample(shape: tuple[int, ...]) -> Sample:
    (sample,) = gradient_samples(["p"], [shape], seed=5)
    assert not sample.whole
    return sample


def _elements(runs: GradientRuns) -> tuple[np.ndarray, np.ndarray]:
    """Local offset and group of each element that is read."""
    offsets, lengths = runs.offsets.numpy().astype(np.int64), runs.lengths.numpy()
    codes, lanes = runs.groups.numpy(), np.arange(RUN)
    used = lanes < lengths[:, None]
    groups = np.where(codes[:, None] >= BY_LANE, codes[:, None] - BY_LANE + lanes, codes[:, None])
    return (offsets[:, None] + lanes)[used], groups[used]


def _assert_is_sample(found: Sequence[tuple[np.ndarray, np.ndarray]], sample: Sample) -> None:
    indices = np.concatenate([i for i, _ in found])
    groups = np.concatenate([g for _, g in found])
    # Two neighboring strata may draw the same cell, each for its own group.
    order = np.lexsort((groups, indices))
    wanted = np.lexsort((sample.element_groups, sample.indices))
    np.testing.assert_array_equal(indices[order], sample.indices[wanted])
    np.testing.assert_array_equal(groups[order], sample.element_groups[wanted])


@pytest.mark.parametrize("kind", ["everything", "flat", "box", "slivers"])
@pytest.mark.parametrize("design", [*SHAPES])
def test_ranks_together_read_the_global_sample(design: str, kind: str) -> None:
    shape = SHAPES[design]
    sample = _sample(shape)
    found, lengths = [], set()
    for region, held in _regions(kind, shape):
        runs = build_gradient_runs(
            [given_shard("p", shape, region)], Samples.of([sample]), [0], CPU
        )
        assert runs.first.tolist() == [0, len(runs.codes)]
        lengths |= set(runs.lengths.tolist())
        local, groups = _elements(runs)
        found.append((held[local], groups))
    _assert_is_sample(found, sample)
    if kind in ("flat", "box"):
        assert min(lengths) < RUN  # some run was cut


def test_runs_of_several_parameters_lie_one_after_another() -> None:
    shapes = [SHAPES["odd shape"], SHAPES["spread evenly"], SHAPES["every column"]]
    samples = [_sample(shape) for shape in shapes]
    shards = [given_shard("p", shape, Everything()) for shape in shapes]
    runs = build_gradient_runs(shards, Samples.of(samples), [0, 2], CPU)
    assert runs.first[1] == runs.first[2]
    offsets, _ = _elements(runs)
    wanted = np.concatenate((samples[0].indices, samples[2].indices))
    np.testing.assert_array_equal(offsets, wanted)


def test_offsets_are_wide_only_where_they_must_be() -> None:
    for numel, dtype in ((2**31 - 8, torch.int32), (2**32, torch.int64)):
        sample = Sample("p", numel, 0, row_strata=1, cell_strata=512)
        runs = build_gradient_runs(
            [given_shard("p", (numel,), Everything())], Samples.of([sample]), [0], CPU
        )
        assert runs.offsets.dtype == dtype
        np.testing.assert_array_equal(_elements(runs)[0], sample.indices)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "every other", "expanded"])
@pytest.mark.parametrize("design", ["every column", "spread evenly"])
def test_runs_in_memory_of_a_strided_gradient(design: str, layout: str) -> None:
    shape = SHAPES[design]
    sample = _sample(shape)
    rows, columns = shape
    values = torch.arange(prod(shape)).reshape(shape)
    if layout == "transposed":
        grad = values.t().contiguous().t()
    elif layout == "sliced":
        grad = torch.cat((values, -values), 1)[:, :columns]
    elif layout == "every other":
        grad = torch.stack((values, -values), 2)[:, :, 0]
    else:
        grad = values[0].expand(rows, columns)
    shards = [given_shard("p", shape, Everything())] * 2
    runs = build_gradient_runs(shards, Samples.of([sample] * 2), [0, 1], CPU)
    strided = runs_in_memory(runs, {1: grad})
    end = int(runs.first[1])
    assert torch.equal(strided.offsets[:end], runs.offsets[:end])
    assert torch.equal(strided.codes[:end], runs.codes[:end])
    memory = torch.as_strided(grad, (1 + _reach(grad),), (1,)).numpy()
    tail = GradientRuns(strided.first, strided.offsets[end:], strided.codes[end:])
    offsets, groups = _elements(tail)
    read = sorted(zip(memory[offsets], groups, strict=True))
    flat = grad.reshape(-1).numpy()
    assert read == sorted(zip(flat[sample.indices], sample.element_groups, strict=True))
    if layout == "sliced":
        assert len(tail.codes) <= len(runs.codes) - end + rows


def _reach(tensor: torch.Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))

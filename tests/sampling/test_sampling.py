"""The sample: the same everywhere, unbiased, and small."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmon.layout import capture
from distmon.probe import TorchProbe
from distmon.record.sample_tables import Sampling
from distmon.record.standard_error import DEGREES, student_factor
from distmon.record.statistics import moments, param_table
from distmon.reduce.buffers import HostBuffers
from distmon.reduce.reduced_view import BufferSizes
from distmon.sampling.designs import FREE_POINTS, MOST_POINTS, RUNS_ELSEWHERE, TABLE_POINTS
from distmon.sampling.plan import SamplePlan, build_plan
from distmon.sampling.reading import Reading
from distmon.sampling.sample import choose

CPU = torch.device("cpu")


@given(
    numel=st.integers(0, 5_000_000),
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_sample_is_inside_sized_and_spread(numel: int, size: int, seed: int) -> None:
    sample = choose("layer.weight", numel, size, seed)
    wanted = -(-size // 8) * 8
    if numel <= wanted:
        assert sample.whole
        assert np.array_equal(sample.indices, np.arange(numel))
        return
    assert wanted - 7 <= len(sample.indices) <= wanted
    assert sample.indices.min() >= 0
    assert sample.indices.max() < numel
    # Runs are aligned, and stratum k lies in its own part of the parameter.
    starts = sample.indices[::8]
    assert (starts % 8 == 0).all()
    stratum = numel / len(starts)
    assert (np.abs(starts - stratum * (np.arange(len(starts)) + 0.5)) <= stratum / 2 + 16).all()


def test_sample_depends_on_name_and_seed_only() -> None:
    again = choose("a.weight", 10**6, 1024, 0).indices
    assert np.array_equal(choose("a.weight", 10**6, 1024, 0).indices, again)
    assert not np.array_equal(choose("b.weight", 10**6, 1024, 0).indices, again)
    assert not np.array_equal(choose("a.weight", 10**6, 1024, 1).indices, again)
    # Frozen here: a change would make records of one run incomparable after an update.
    assert again[:24:8].tolist() == [784, 9736, 19192]


def test_offsets_beyond_int32_stay_exact() -> None:
    numel = 3 * 2**31
    sample = choose("huge", numel, 1024, 0)
    assert sample.indices.max() > 2**32
    assert sample.indices.max() < numel


def _dense(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(400, 250, generator=generator)


def _sparse(generator: torch.Generator) -> torch.Tensor:
    x = _dense(generator)
    return x * (torch.rand(x.shape, generator=generator) < 0.1)


def _heavy_tailed(generator: torch.Generator) -> torch.Tensor:
    x = _dense(generator)
    return x / torch.rand(x.shape, generator=generator).clamp(min=1e-3).pow(0.45)


def _row_structured(generator: torch.Generator) -> torch.Tensor:
    scale = torch.logspace(-3, 1, 400)[torch.randperm(400, generator=generator)]
    return _dense(generator) * scale[:, None]


def _norms(weight: torch.Tensor, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimated norm and standard error of one parameter for many seeds, through the whole path."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(weight)})
    shards = capture(model)
    found = []
    for seed in range(seeds):
        plan = build_plan(shards, Reading(), seed, CPU)
        buffers = HostBuffers(BufferSizes(1, bins=False), rank=0)
        TorchProbe(plan, shards).measure(buffers.rows, torch.zeros(1, dtype=torch.float64))
        sampling = Sampling.describe(plan, [2], [True])
        reduced = buffers.view.read()
        estimates = moments(reduced, sampling)
        table = param_table(reduced, estimates, sampling, 1e-12).columns
        stderr = table["weight_norm_stderr"][0] / student_factor(DEGREES)
        found.append((table["weight_norm"][0], stderr))
    norms, errors = np.array(found).T
    return norms, errors


@pytest.mark.parametrize("kind", [_dense, _sparse, _heavy_tailed, _row_structured])
def test_norms_are_unbiased(kind: Callable[[torch.Generator], torch.Tensor]) -> None:
    weight = kind(torch.Generator().manual_seed(1))
    true = weight.double().norm().item()
    norms, errors = _norms(weight, 200)
    assert abs(norms.mean() - true) < 3 * norms.std(ddof=1) / np.sqrt(len(norms))
    # The reported standard error is that of the estimates, within a factor of 1.5 on average.
    assert norms.std(ddof=1) / 1.5 < np.sqrt(np.mean(errors**2)) < norms.std(ddof=1) * 1.5


def test_a_parameter_read_whole_has_no_error() -> None:
    norms, errors = _norms(torch.randn(1000), 3)
    assert errors.max() == 0
    assert np.ptp(norms) == 0


def test_memory_of_snapshot_and_tables() -> None:
    """At most 12 bytes per sampled element, and nothing that grows with the parameters' size."""
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300, bias=False) for _ in range(20)])
    wide = torch.nn.Sequential(*[torch.nn.Linear(900, 900, bias=False) for _ in range(20)])
    small, large = (build_plan(capture(m), Reading(), 0, CPU) for m in (model, wide))
    assert large.nbytes == small.nbytes
    _assert_small(large, 20)


def test_memory_with_small_and_odd_parameters() -> None:
    sizes = (1, 3, 17, 100, 768, 1000, 1023, 5000, 0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n)) for n in sizes])
    plan = build_plan(capture(model), Reading(), 0, CPU)
    _assert_small(plan, len(sizes))


def test_rows_of_tall_matrices_fit_in_what_small_parameters_leave() -> None:
    shapes = [(50_257, 64), *[(768,)] * 98, *[(768, 768)] * 48]
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s)) for s in shapes])
    plan = build_plan(capture(model), Reading(), 0, CPU)
    assert plan.samples[0].count == MOST_POINTS  # single elements, each in another row
    assert plan.nbytes - plan.gradient_runs.nbytes <= 12 * 1024 * len(shapes)


def test_every_row_of_the_tables_of_a_small_model() -> None:
    """A step of 64 words moves some 40 rows of 33 278: a sample of 6000 rows sees 7 of them."""
    shapes = [(33_278, 128), (33_278, 128), (3000, 3000), *[(512,)] * 5]
    plan = _plan(shapes)
    for table in plan.samples[:2]:
        assert (np.sort(table.indices // 128) == np.arange(33_278)).all()
    assert plan.nbytes - plan.gradient_runs.nbytes <= 12 * FREE_POINTS


def test_a_run_in_every_row_where_tables_are_most_of_a_model() -> None:
    shapes = [(33_278, 128), (33_278, 128), *[(512, 128)] * 4, *[(512,)] * 5]
    plan = _plan(shapes)
    for table in plan.samples[:2]:
        rows = np.sort(table.indices // 128).reshape(-1, 8)
        assert (rows == np.arange(33_278)[:, None]).all()
    assert plan.nbytes - plan.gradient_runs.nbytes <= 12 * TABLE_POINTS


def test_tables_of_a_small_model_share_what_is_free() -> None:
    shapes = [(300_000, 16), (40_000, 16), (5000, 16), (700, 16), (64, 64)]
    plan = _plan(shapes)
    largest, *others = (sample.count for sample in plan.samples[:3])
    assert others == [8 * 40_000, 8 * 5000]  # a run in every row of the smallest
    assert np.bincount(plan.samples[0].indices // 16, minlength=300_000).min() >= 1
    assert 0.9 * TABLE_POINTS < largest + sum(others) <= TABLE_POINTS
    assert plan.nbytes - plan.gradient_runs.nbytes <= 12 * TABLE_POINTS


def _plan(shapes: list[tuple[int, ...]]) -> SamplePlan:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s)) for s in shapes])
    return build_plan(capture(model), Reading(), 0, CPU)


def _assert_small(plan: SamplePlan, parameters: int) -> None:
    """At most 12 bytes per sampled element, and 5 for each run of a gradient."""
    assert plan.nbytes - plan.gradient_runs.nbytes <= 12 * 1024 * parameters
    assert plan.gradient_runs.nbytes <= 5 * RUNS_ELSEWHERE * parameters

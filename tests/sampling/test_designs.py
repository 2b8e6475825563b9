"""Every design: unbiased, and two standard errors cover the truth in at least 93% of cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from csrc_triton.row_layout import GROUPS, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.record.sample_tables import SampleTable, Sampling
from distmon.record.statistics import Moments, moments
from distmon.reduce.reduced import Reduced
from distmon.sampling.designs import (
    MOST_RUNS,
    RUNS_ELSEWHERE,
    TABLE_POINTS,
    WHOLE_UP_TO,
    gradient_samples,
    weight_samples,
)
from distmon.sampling.sample import Sample
from distmon.sampling.sample_numbers import SampleNumbers
from distmon.sampling.samples import Samples

SEEDS = 400


def _dense(make: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return make.standard_normal(shape)


def _row_structured(
    make: np.random.Generator, shape: tuple[int, int], exponent: float = 0.5
) -> np.ndarray:
    """Rows of frequent and of rare tokens, most with no gradient; one has an eighth of it all."""
    scale = (1.0 + make.permutation(shape[0])) ** -exponent
    return make.standard_normal(shape) * np.where(make.random(shape[0]) < 0.3, scale, 0)[:, None]


def _one_row(make: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One row has a third of the squared norm."""
    return _row_structured(make, shape, 0.75)


def _graded_rows(make: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rows of very different size, all of them there."""
    return make.standard_normal(shape) * np.logspace(-2, 0, shape[0])[:, None]


def _columns(make: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.ascontiguousarray(_row_structured(make, shape[::-1]).T)


def _heavy_tailed(make: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Student's t with 5 degrees of freedom: squares have a variance, but no skewness."""
    return make.standard_t(5, shape)


def _few_elements(make: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Squares with a tail so heavy that they hardly have a mean."""
    return make.standard_normal(shape) / np.maximum(make.random(shape), 1e-3) ** 0.45


def _weights(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[Sample, ...]:
    return weight_samples(names, shapes, 1024, 0)


def _weights_of_small_models(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> tuple[Sample, ...]:
    samples = []
    for name, shape in zip(names, shapes, strict=True):  # each with nothing beside it
        samples += weight_samples([name], [shape], 1024, 0)
    return tuple(samples)


def _gradients(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[Sample, ...]:
    samples = []
    for name, shape in zip(names, shapes, strict=True):  # one by one: no run is given up
        samples += gradient_samples([name], [shape], 0)
    return tuple(samples)


def _estimates(samples: Sequence[Sample], values: np.ndarray) -> Moments:
    """Estimate the same tensor from each of the samples."""
    flat, first = values.reshape(-1), SUM["g_sq0"]
    sums = np.zeros((len(samples), len(SUM_COLUMNS)))
    for i, sample in enumerate(samples):
        x = flat[sample.indices]
        sums[i, SUM["g_count"]], sums[i, SUM["g_sum"]] = len(x), x.sum()
        squares = np.bincount(sample.element_groups, x * x, GROUPS)
        sums[i, first : first + GROUPS] = squares
    numel = np.full(len(samples), float(flat.size))
    table = SampleTable.of(SampleNumbers.of(Samples.of(samples)), numel)
    names = tuple(sample.name for sample in samples)
    trainable = np.ones(len(samples), dtype=bool)
    sampling = Sampling(names, dict.fromkeys("wgu", table), numel, numel * 0 + 2, trainable)
    reduced = Reduced(
        sums=sums,
        maxima=np.zeros((len(samples), len(MAX_COLUMNS))),
        bins=None,
        ranks={},
        errors={},
        partial_gradients=np.empty(0),
    )
    return moments(reduced, sampling)["g"]


Choose = Callable[..., tuple[Sample, ...]]
Kind = Callable[..., np.ndarray]
DESIGNS: list[tuple[str, Choose, tuple[int, int], Kind, int]] = [
    ("every row once", _gradients, (4100, 1101), _heavy_tailed, SEEDS),
    ("every row often", _gradients, (4400, 1001), _row_structured, 100),  # a million elements each
    ("every column", _gradients, (500, 4096), _columns, SEEDS),
    ("every column", _gradients, (500, 4096), _heavy_tailed, SEEDS),
    ("spread evenly", _gradients, (1000, 300), _dense, SEEDS),
    ("spread evenly", _gradients, (1000, 300), _graded_rows, SEEDS),
    ("spread evenly", _gradients, (1000, 300), _heavy_tailed, SEEDS),
    ("points", _weights, (4100, 300), _dense, SEEDS),
    ("points", _weights, (4100, 300), _graded_rows, SEEDS),
    ("a point in every row", _weights_of_small_models, (17_000, 30), _graded_rows, 100),
    ("a run in every row", _weights_of_small_models, (4100, 101), _graded_rows, 100),
    ("runs", _weights, (1000, 300), _graded_rows, SEEDS),
]


@pytest.mark.parametrize(("design", "choose", "shape", "kind", "seeds"), DESIGNS)
def test_unbiased_and_covered(
    design: str, choose: Choose, shape: tuple[int, int], kind: Kind, seeds: int
) -> None:
    error, bias, covered = _quality(design, choose, shape, kind, seeds)
    assert bias <= 3 * error
    assert covered >= 0.93


def test_every_row_once_is_unbiased_on_rows() -> None:
    error, bias, _ = _quality("every row once", _gradients, (4100, 1101), _row_structured, SEEDS)
    assert bias <= 3 * error


@pytest.mark.parametrize(
    ("shape", "kind", "seeds"),
    [
        ((4100, 1101), _row_structured, 1000),
        ((4100, 1101), _one_row, 1000),
        ((1000, 300), _few_elements, 2000),
    ],
)
def test_covered_where_few_elements_dominate(
    shape: tuple[int, int], kind: Kind, seeds: int
) -> None:
    _, _, covered = _quality("every row once", _gradients, shape, kind, seeds)
    assert covered >= 0.93


def _quality(
    design: str, choose: Choose, shape: tuple[int, int], kind: Kind, seeds: int
) -> tuple[float, float, float]:
    """Standard error of the mean squared norm, its distance from the truth, and coverage."""
    values = kind(np.random.default_rng(7), shape)
    samples = choose([f"{design} {i}" for i in range(seeds)], [shape] * seeds)
    assert not any(sample.whole for sample in samples)
    found = _estimates(samples, values)
    square = (values**2).sum()
    covered = np.abs(found.norm - np.sqrt(square)) <= 2 * found.stderr
    error = found.square.std(ddof=1) / np.sqrt(seeds)
    return float(error), float(abs(found.square.mean() - square)), float(covered.mean())


def test_what_is_read_of_each_shape() -> None:
    shapes = [(WHOLE_UP_TO,), (WHOLE_UP_TO + 1,), (50_000, 768), (768, 50_000), (1000, 1000)]
    names = [f"p{i}" for i in range(len(shapes))]
    small, vector, tall, wide, square = gradient_samples(names, shapes, 0)
    assert small.whole
    assert vector.whole
    assert square.count == RUNS_ELSEWHERE * 8
    assert np.array_equal(np.unique(tall.indices // 768), np.arange(50_000))
    assert np.array_equal(np.unique(wide.indices % 50_000), np.arange(50_000))
    assert tall.by_lane
    assert not wide.by_lane


def test_tables_of_all_tall_matrices_are_bounded() -> None:
    shapes = [(8192, 8192)] + [(250_000, 256)] * 3 + [(2_000_000, 64)] * 3
    samples = gradient_samples([f"p{i}" for i in range(7)], shapes, 0)
    runs = [-(-sample.count // 8) for sample in samples]
    assert sum(runs) <= MOST_RUNS + RUNS_ELSEWHERE
    assert runs[0] == RUNS_ELSEWHERE  # the least tall gives way first
    assert min(runs[1:]) > 100 * RUNS_ELSEWHERE  # the others share what there is


def test_a_table_of_more_rows_than_runs_is_not_left_to_chance() -> None:
    """Ten million rows, one in a thousand with a gradient: 1024 runs would see one or two."""
    rows = 10_000_000
    (sample,) = gradient_samples(["table"], [(rows, 16)], 0)
    assert -(-sample.count // 8) == MOST_RUNS
    touched = np.arange(0, rows, 1000)
    seen = np.isin(touched, sample.starts // 16).mean()
    assert abs(seen - MOST_RUNS / rows) < 0.03
    shares = gradient_samples(["a", "b"], [(6_000_000, 16), (3_000_000, 16)], 0)
    assert shares[0].count == pytest.approx(2 * shares[1].count, rel=0.01)


def test_short_rows_are_read_whole_as_far_as_a_long_vector_is() -> None:
    """One run of the few in a row is as much traffic, and may miss what dominates the row."""
    shapes = [(100_000, 32), (100_000, 33), (2_000_000, 32), (MOST_RUNS * 8,)]
    short, longer, many, vector = gradient_samples(["a", "b", "c", "d"], shapes, 0)
    assert [s.whole for s in (short, vector, longer, many)] == [True, True, False, False]


def test_the_bias_of_a_head_over_a_vocabulary_is_sampled_whole() -> None:
    """Few of its elements move far, as few rows of the head do; a sample of 1024 missed them."""
    names, shapes = ["tokens", "head", "bias"], [(100_000, 32), (100_000, 32), (100_000,)]
    tokens, head, bias = weight_samples(names, shapes, 1024, 0)
    assert bias.whole
    assert min(tokens.count, head.count) > 4 * 100_000
    assert tokens.count + head.count + bias.count <= TABLE_POINTS + 3 * 1024


def test_many_long_vectors_do_not_take_what_tables_need() -> None:
    names = [f"p{i}" for i in range(41)]
    samples = weight_samples(names, [(16_384,)] * 40 + [(50_000, 1024)], 1024, 0)
    assert samples[-1].count >= 50_000
    assert {sample.count for sample in samples[:-1]} == {1536}

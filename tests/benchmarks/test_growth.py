"""Slopes: known lines are found again, and only cases that belong together are on one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_results import GPT2, write, write_growing

from benchmarks.scale.growth import AXES, fit, growth_section, series
from distmon.bench.results import Case, Results, read


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return read(write_growing(tmp_path_factory.mktemp("growing")))


@pytest.mark.parametrize("slope", [-0.5, 0.0, 1.0, 2.0])
def test_a_power_law_is_found_again(slope: float) -> None:
    x = [1.0, 10.0, 100.0, 1000.0]
    found = fit(x, [3e-6 * each**slope for each in x])
    assert found.slope == pytest.approx(slope)
    assert found.factor == pytest.approx(3e-6)
    assert found.standard_error == pytest.approx(0, abs=1e-12)
    assert found.growth(10) == pytest.approx(10**slope)


def test_the_standard_error_covers_the_truth() -> None:
    """Of 400 noisy lines, the true slope is within one standard error in about 68%."""
    generator = np.random.default_rng(0)
    x = np.repeat([100.0, 1000.0, 10_000.0], 7)
    within = 0
    for _ in range(400):
        found = fit(x, x * generator.lognormal(0, 0.2, len(x)))
        within += abs(found.slope - 1) <= (found.standard_error or 0)
    assert 0.6 < within / 400 < 0.75


def test_two_points_have_no_standard_error() -> None:
    assert fit([1, 10], [1, 10]).standard_error is None


def test_cases_that_belong_together_are_on_one_line(growing: Results) -> None:
    lines = {
        axis: {line.contender: line for line in series(growing, axis)}["distmon sampled"]
        for axis in AXES
    }
    assert lines["tensors"].x == [100, 1000, 10_000]
    assert lines["elements"].x == [640_000, 6_400_000, 64_000_000]
    assert lines["ranks"].x == [1, 2, 4]
    assert all(GPT2 not in line.cases for line in lines.values()), "a model of another shape"
    slope = lines["tensors"].slope
    assert slope is not None
    assert slope.slope == pytest.approx(1, abs=0.02)
    each = [m / x for m, x in zip(lines["tensors"].medians, lines["tensors"].x, strict=True)]
    assert each == pytest.approx([4e-6] * 3, rel=0.05)


def test_differences_below_zero_have_no_slope(tmp_path: Path) -> None:
    cases = [Case("a", "fp32", "none", 1, n, 256 * n) for n in (100, 1000)]
    folder = write(tmp_path, {"distmon sampled": 1e-3, "naive hooks": -1e-3}, cases=cases)
    lines = {line.contender: line for line in series(read(folder), "tensors")}
    assert lines["distmon sampled"].slope is not None
    assert lines["naive hooks"].slope is None


def test_a_wrong_answer_is_marked_along_a_line(tmp_path: Path) -> None:
    cases = [Case("a", "fp32", "none", 1, n, 256 * n) for n in (100, 1000)]
    seconds = {"distmon sampled": 1e-3, "naive clone": 1e-2}
    results = read(write(tmp_path, seconds, cases=cases, wrong={"distmon sampled": "a is 2"}))
    names = [row[1] for row in growth_section(results).rows if row[0] == "tensors"]
    assert names == ["distmon sampled, answer wrong", "naive clone"]

"""Errors of estimates, coverage, and claims of zero: every answer is known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.accuracy.estimate_error import (
    claims_zero,
    coverage,
    has_error_bar,
    is_covered,
    is_unknown,
    percentile,
    relative_error,
    rms,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("estimate", "truth", "expected"),
    [
        (3.0, 2.0, 0.5),
        (1.0, 2.0, -0.5),
        (0.0, 2.0, -1.0),
        (0.0, 0.0, 0.0),
        (NAN, NAN, 0.0),  # no gradient, and none is reported
        (1.0, 0.0, INF),
        (NAN, 2.0, INF),  # a missing number is no good one
        (2.0, NAN, INF),  # a number about nothing
    ],
)
def test_relative_error(estimate: float, truth: float, expected: float) -> None:
    assert relative_error(estimate, truth) == pytest.approx(expected)


def test_covered_within_two_standard_errors_and_rounding() -> None:
    estimate = [1.0, 1.0, 1.0, 1.0, 0.0]
    stderr = [0.1, 0.1, 0.0, 0.0, 0.0]
    truth = [1.19, 1.21, 1.0 + 1e-7, 1.0 + 1e-5, 2.0]
    assert is_covered(estimate, stderr, truth).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(("estimate", "stderr"), [(NAN, NAN), (NAN, 0.0), (1.0, NAN), (1.0, INF)])
def test_unknown_is_neither_covered_nor_a_claim(estimate: float, stderr: float) -> None:
    assert is_unknown(estimate, stderr, 1.0)
    assert not is_covered(estimate, stderr, 1.0)
    assert not claims_zero(estimate, stderr, 1.0)
    assert math.isnan(coverage(estimate, stderr, 1.0))


def test_nothing_to_know_is_not_unknown() -> None:
    assert not is_unknown(NAN, NAN, NAN)
    assert is_covered(NAN, NAN, NAN)


def test_zero_claims_need_both_zeros_and_a_truth_that_is_not() -> None:
    assert claims_zero([0, 0, 0, 1], [0, 1, 0, 0], [5, 5, 0, 5]).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_numbers_read_in_full_do_not_make_up_for_wrong_error_bars() -> None:
    exact, missed, covered, zero_claim, unknown = (
        (1.0, 0.0, 1.0),
        (1.0, 0.1, 2.0),
        (1.9, 0.1, 2.0),
        (0.0, 0.0, 2.0),
        (1.0, INF, 2.0),
    )
    numbers = np.array([exact] * 20 + [missed, covered, zero_claim, unknown]).T
    assert has_error_bar(*numbers).sum() == 3
    assert coverage(*numbers) == pytest.approx(1 / 3)


def test_percentiles_are_magnitudes_and_survive_infinite_errors() -> None:
    errors = [*([-0.1] * 98), 0.2, INF]
    assert percentile(errors, 50) == pytest.approx(0.1)
    assert percentile(errors, 98) == pytest.approx(0.2)
    assert percentile(errors, 100) == INF
    assert math.isnan(percentile([], 50))


def test_rms() -> None:
    assert rms([3.0, -4.0]) == pytest.approx(math.sqrt(12.5))
    assert math.isnan(rms([]))

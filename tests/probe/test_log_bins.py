"""Percentiles from log-spaced bins, against numpy on the raw values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from csrc_triton.row_layout import (
    BIN_WIDTH,
    BIN_WORDS,
    BINS,
    SMALLEST_EXPONENT,
    bin_words,
    count_bits,
)
from distmon.probe.log_bins import histogram_by_row, log_bin, pack_bins
from distmon.probe.percentiles import bin_values, percentiles, unpack_bins

QUANTILES = (0, 25, 50, 75, 95, 99, 100)


def _bound(values: np.ndarray, quantile: float) -> float:
    """What the stated relative error allows: on each of the two order statistics in between."""
    ordered = np.sort(values.astype(np.float64))
    rank = (len(values) - 1) * quantile / 100
    low, high = ordered[int(np.floor(rank))], ordered[int(np.ceil(rank))]
    fraction = rank - np.floor(rank)
    return BIN_WIDTH * ((1 - fraction) * abs(low) + fraction * abs(high)) + 2.0**SMALLEST_EXPONENT


def _estimates(values: np.ndarray) -> list[float]:
    counts = histogram_by_row(torch.from_numpy(values)[None]).numpy()
    lowest, highest = np.array([values.min()]), np.array([values.max()])
    return [float(e[0]) for e in percentiles(counts, lowest, highest, QUANTILES)]


@given(
    arrays.arrays(
        np.float32,
        st.integers(1, 400),
        elements=st.floats(-(2.0**15), 2.0**15, width=32, allow_subnormal=True),
    )
)
@settings(max_examples=300, deadline=None)
def test_percentiles_are_within_the_stated_error(values: np.ndarray) -> None:
    exact = np.percentile(values.astype(np.float64), QUANTILES)
    for quantile, truth, estimate in zip(QUANTILES, exact, _estimates(values), strict=True):
        assert abs(estimate - truth) <= _bound(values, quantile) * (1 + 1e-9)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e3])
def test_percentiles_of_normal_gradients(scale: float) -> None:
    values = (np.random.default_rng(0).standard_normal(1024) * scale).astype(np.float32)
    exact = np.percentile(values.astype(np.float64), QUANTILES)
    for quantile, truth, estimate in zip(QUANTILES, exact, _estimates(values), strict=True):
        assert abs(estimate - truth) <= _bound(values, quantile)


@pytest.mark.parametrize("words", BIN_WORDS)
def test_sums_of_packed_counts_are_sums_of_counts(words: int) -> None:
    most = min(1 << count_bits(words), 1 << 20) - 1
    counts = torch.from_numpy(np.random.default_rng(0).integers(0, most // 4, (4, 3, BINS)))
    counts[:, 0] = most // 4  # every bin of the first row is full
    added = pack_bins(counts.double(), words).sum(0)
    assert unpack_bins(added.numpy()).tolist() == counts.sum(0).tolist()


def test_words_have_room_for_what_is_counted() -> None:
    assert [bin_words(most) for most in (0, (1 << 17) - 1, 1 << 17, 1 << 26)] == [80, 80, 120, 240]
    assert all(bin_words((1 << count_bits(words)) - 1) <= words for words in BIN_WORDS)


def test_bins_are_in_value_order_and_hold_their_own_value() -> None:
    values = bin_values()
    assert len(values) == BINS
    assert (np.diff(values) >= 0).all()
    inner = np.r_[1 : BINS // 2 - 1, BINS // 2 + 1 : BINS - 1]
    found = log_bin(torch.from_numpy(values[inner].astype(np.float32))).numpy()
    assert np.array_equal(found, inner)


def test_values_beyond_the_bins_read_as_the_extremes() -> None:
    values = np.array([-1e30, 1e30, 1e30], dtype=np.float32)
    assert _estimates(values)[-1] == np.float32(1e30)
    assert _estimates(values)[0] == np.float32(-1e30)


def test_a_row_without_gradients_has_no_percentiles() -> None:
    none = percentiles(np.zeros((1, BINS)), np.array([np.nan]), np.array([np.nan]), [50])
    assert np.isnan(none[0][0])

"""Bins keep what they must: means, extremes, NaN and Inf, in bounded memory and size."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from distmon.report.downsampling import StreamingGrid, bin_edges, binned, last_of
from distmon.report.encoding import packed, script_json, short_name
from distmon.report.sparkline import sparkline


def unpacked(text: str) -> np.ndarray:
    halves = np.frombuffer(base64.b64decode(text), "<u2")
    return (halves.astype(np.uint32) << 16).view(np.float32)


def test_packed_values_keep_sign_range_and_what_is_not_finite() -> None:
    values = np.array([[1e-30, -2.5, 0.0, np.nan], [np.inf, -np.inf, 3e38, 1.0078]])
    found = unpacked(packed(values)).reshape(4, 2).T
    np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(values))
    finite = np.isfinite(values)
    np.testing.assert_allclose(found[finite], values[finite], rtol=2**-8)
    assert np.isfinite(unpacked(packed(np.array([[np.finfo(np.float32).max]])))).all()


def test_bins_cover_everything_once() -> None:
    steps = np.arange(1, 1004)
    edges = bin_edges(len(steps), 10)
    assert len(edges) == 10
    assert last_of(steps, edges)[-1] == 1003
    values = np.where(steps == 500, 1e6, 1.0)
    assert binned(values, edges, "max").max() == 1e6
    np.testing.assert_allclose(binned(steps * 1.0, edges).mean(), steps.mean(), rtol=1e-3)
    holes = np.where(steps < 200, np.nan, 2.0)
    assert np.isnan(binned(holes, edges)[0])
    assert binned(holes, edges)[-1] == 2.0


def test_a_stream_of_unknown_length_stays_in_its_columns() -> None:
    grid = StreamingGrid(("a", "b"), 3, 8)
    truth = np.random.default_rng(0).random((2, 3, 1000))
    truth[0, 1, 700], truth[0, 1, 701] = np.inf, -np.inf
    truth[1, 2, :] = np.nan
    for at in range(1000):
        grid.add(at + 1, np.arange(3), truth[:, :, at])
    steps, means = grid.means("a", np.arange(3), 1)
    assert steps == [1000]
    np.testing.assert_allclose(means[[0, 2], 0], truth[0, [0, 2]].mean(axis=1), rtol=1e-5)
    assert np.isinf(means[1, 0])
    steps, means = grid.means("a", np.arange(3), 100)
    assert 8 <= len(steps) <= 16
    assert np.isinf(means[1]).sum() == 1
    assert np.isnan(grid.means("b", np.array([2]), 100)[1]).all()


def test_rows_that_appear_later_are_added() -> None:
    grid = StreamingGrid(("a",), 1, 4)
    grid.add(1, np.array([0]), np.array([[1.0]]))
    grid.grow(2)
    grid.add(2, np.array([1]), np.array([[5.0]]))
    means = grid.means("a", np.arange(2), 4)[1]
    np.testing.assert_array_equal(means, [[1.0, np.nan], [np.nan, 5.0]])


def test_json_in_a_script_element_cannot_end_it() -> None:
    text = script_json({"</script>": ["<!--", float("nan")]})
    assert "<" not in text
    assert "null" in text
    assert len(short_name("x" * 10_000)) <= 120


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([1, 1, 1], "▁▁▁"),
        ([1, float("nan"), 8], "▁x█"),
        ([], ""),
    ],
)
def test_sparklines(values: list[float], expected: str) -> None:
    assert sparkline(values, 8) == expected
    assert len(sparkline([*range(1000)], 20)) == 20

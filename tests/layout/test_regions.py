"""Regions against slices of a numpy array."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distmon.layout.shard import EMPTY_REGION, Box, Everything, FlatRange, region_of_box


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, offset, size


@given(boxes())
def test_box_matches_numpy_slicing(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, offset, size = box
    whole = np.arange(prod(shape)).reshape(shape)
    block = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1)
    expected = np.full(whole.size, -1)
    expected[block] = np.arange(block.size)
    indices = np.arange(whole.size, dtype=np.int64)
    assert np.array_equal(Box(shape, offset, size).local(indices), expected)
    assert np.array_equal(region_of_box(shape, offset, size).local(indices), expected)


def test_region_of_box_returns_the_simplest_region() -> None:
    assert region_of_box((4, 3), (0, 0), (4, 3)) == Everything()
    assert region_of_box((4, 3), (1, 0), (2, 3)) == FlatRange(3, 9)
    assert region_of_box((4, 3), (0, 1), (4, 2)) == Box((4, 3), (0, 1), (4, 2))
    assert region_of_box((4, 3), (2, 0), (0, 3)) is EMPTY_REGION
    assert region_of_box((), (), ()) == Everything()


def test_different_regions_have_different_keys() -> None:
    keys = [
        region_of_box((4, 4), (0, 0), (4, 4)).key(),
        region_of_box((4, 4), (0, 0), (2, 4)).key(),
        region_of_box((4, 4), (2, 0), (2, 4)).key(),
        region_of_box((4, 4), (0, 0), (2, 2)).key(),
        region_of_box((4, 4), (0, 2), (2, 2)).key(),
        EMPTY_REGION.key(),
    ]
    assert len({*keys}) == len(keys)

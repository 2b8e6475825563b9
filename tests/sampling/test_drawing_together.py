"""Samples that are drawn together, and in part, are those that are drawn alone and whole."""

from __future__ import annotations

import numpy as np
import pytest

from csrc_triton.row_layout import GROUPS
from distmon.sampling.sample import Sample, draw
from distmon.sampling.sample_numbers import SampleNumbers
from distmon.sampling.samples import Samples

DESIGNS = {
    "even": (1000, 1, 16, 1, 8),
    "short last cell": (33 * 77, 1, 10, 1, 8),
    "every row": (5000 * 33, 5000, 1, 5000, 8),
    "several runs in every row": (5000 * 33, 5000, 3, 5000, 8),
    "some rows": (64 * 101, 16, 4, 64, 8),
    "every column": (100 * 4099, 8, 513, 100, 8),
    "points": (9999, 1, 4096, 1, 1),
    "whole": (50, 1, 7, 1, 8),
}


NAMES = ["a", "b", "c"]


def _samples(design: tuple[int, int, int, int, int]) -> list[Sample]:
    numel, *rest = design
    return [Sample(name, numel, 3, *rest) for name in NAMES]


@pytest.mark.parametrize("name", DESIGNS)
def test_a_range_has_every_run_that_meets_it(name: str) -> None:
    samples = _samples(DESIGNS[name])
    numel = samples[0].numel
    make = np.random.default_rng(0)
    for _ in range(30):
        begin = int(make.integers(numel))
        end = int(make.integers(begin + 1, numel + 1))
        drawn = draw(samples[0], NAMES, begin, end)
        for row, sample in enumerate(samples):
            starts = sample.starts
            meets = (starts < end) & (starts + sample.lengths(starts) > begin)
            assert {*np.flatnonzero(meets)} <= {*drawn.numbers}
            assert np.array_equal(drawn.starts[row], starts[drawn.numbers])
            assert np.array_equal(drawn.lengths[row], sample.lengths(drawn.starts[row]))


@pytest.mark.parametrize("name", DESIGNS)
def test_numbers_are_those_of_the_elements(name: str) -> None:
    samples = _samples(DESIGNS[name])
    numbers = SampleNumbers.of(Samples.of(samples))
    shares = numbers.group_shares.table
    for row, sample in enumerate(samples):
        found = np.bincount(sample.element_groups, minlength=GROUPS)
        assert numbers.count[row] == len(sample.indices) == found.sum()
        np.testing.assert_allclose(shares[row], found / found.sum())

"""The kernel of activations, interpreted, against float64 references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from csrc_triton.activation_stats import SUM_COLUMNS, add_activation_stats

pytestmark = pytest.mark.usefixtures("launches")
SLOTS = 16


def _reference(x: torch.Tensor, bounds: tuple[float, float]) -> tuple[list[float], np.ndarray]:
    wide = x.double().numpy()
    saturated = ((wide <= bounds[0]) | (wide >= bounds[1])).sum()
    sums = [wide.size, wide.sum(), (wide**2).sum(), (wide == 0).sum(), saturated]
    return sums, np.abs(wide).max((0, 2))


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_first"),
    [
        ((40, 70, 1), torch.float32, False),
        ((3, 70, 50), torch.bfloat16, True),
        ((600, 5, 1), torch.float16, False),
        ((2, 16, 9), torch.float64, True),
    ],
)
def test_statistics_of_one_tensor(
    shape: tuple[int, int, int], dtype: torch.dtype, channels_first: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape if channels_first else (shape[0], shape[2], shape[1])).relu().to(dtype)
    x = x if channels_first else x.movedim(-1, 1)  # not contiguous: units are the last dimension
    x[:, 2] = 0
    sums = torch.zeros(8, dtype=torch.float64)
    absmax, slots = torch.full((1,), -math.inf), torch.full((SLOTS,), -math.inf)
    bounds = (-math.inf, 1.5)
    units = shape[1]
    for _ in range(2):  # rows are added to
        add_activation_stats(x, sums, absmax, slots, (0, units), bounds)
    want, tops = _reference(x, bounds)
    got = sums[: len(SUM_COLUMNS)].numpy() / 2
    # Values are exact in fp64 up to the rounding of the sums.
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert sums[5:].eq(0).all()
    assert float(absmax) == np.float32(tops.max())
    count = min(units, SLOTS)
    chosen = [i * units // count for i in range(count)]
    np.testing.assert_array_equal(slots[:count].numpy(), tops[chosen].astype(np.float32))
    assert (slots[count:] == -math.inf).all()


def test_units_that_are_on_two_ranks() -> None:
    torch.manual_seed(1)
    x = torch.randn(20, 48, 1)
    slots = [torch.full((SLOTS,), -math.inf) for _ in range(3)]
    sums, absmax = torch.zeros(8, dtype=torch.float64), torch.full((1,), -math.inf)
    add_activation_stats(x, sums, absmax, slots[0], (0, 48), (-math.inf, math.inf))
    for i, part in enumerate((x[:, :20], x[:, 20:])):
        place = (20 * i, 48)
        add_activation_stats(part, sums, absmax, slots[i + 1], place, (-math.inf, math.inf))
    assert torch.equal(torch.maximum(slots[1], slots[2]), slots[0])


def test_a_nan_is_infinite_in_the_maxima_and_stays_in_the_sums() -> None:
    x = torch.ones(4, 8, 1)
    x[1, 3, 0] = math.nan
    sums, absmax = torch.zeros(8, dtype=torch.float64), torch.full((1,), -math.inf)
    slots = torch.full((SLOTS,), -math.inf)
    add_activation_stats(x, sums, absmax, slots, (0, 8), (-math.inf, math.inf))
    assert float(absmax) == float(slots[3]) == math.inf
    assert float(slots[2]) == 1
    assert sums[1].isnan()
    assert sums[2].isnan()

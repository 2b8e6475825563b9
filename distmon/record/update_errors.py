"""What the gradient says about the error of an update's norm.

The gradient of a table of embeddings is read in every row or in full, its update in one element of
each row at most. So how well that sample represents the gradient is known, and the spread within
the sample is not all there is to go by: a sample that missed the rows that moved varies little.
In bf16 few elements of a row change at all, so a sample may have the rows that the gradient moves
and still miss what changed in them, while momentum moves many others a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import MAX, SUM
from distmon.probe.percentiles import bin_values
from distmon.record.record import Column
from distmon.record.standard_error import DEGREES, student_factor
from distmon.reduce.reduced import Reduced

if TYPE_CHECKING:
    from distmon.record.sample_tables import Sampling
    from distmon.record.statistics import Moments

SPARSE: Final = 0.5
"""Share of zeros from which on a gradient is that of a table of which a step touches few rows."""
BIN_ERROR: Final = 0.25
"""How far a value may be from the middle of its bin, relative to it."""


def update_error_floor(
    reduced: Reduced, estimates: Mapping[str, Moments], sampling: Sampling
) -> Column:
    """Return the least standard error of each update's norm, relative to the norm.

    NaN, unknown, where the parameter has a gradient but none of the elements whose update was
    sampled has one and moved: what they show is weight decay and momentum. Where the gradient is
    sparse, what a count of so few moved elements leaves open; and where an update is as large as
    its gradient is, as in SGD, how far the same sample is from the norm of the gradient, if it is
    sparse or that is more than bins can be off.
    """
    sums, update, grad = reduced.sums, sampling.tables["u"], estimates["g"]
    finite = sums[:, SUM["g_count"]] - sums[:, SUM["g_nan"]] - sums[:, SUM["g_inf"]]
    zeros, graded = sums[:, SUM["g_zero"]], sums[:, SUM["u_graded"]]
    elementwise = (update.unseen > 0) & (sums[:, SUM["g_unreadable"]] == 0)
    missed = elementwise & (finite > zeros) & (graded == 0)
    floor = np.where(missed, np.nan, 0.0)
    rows = elementwise & ~missed & (zeros > SPARSE * finite)
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = (graded - sums[:, SUM["u_lost"]]) / (estimates["u"].copies * update.cluster)
        by_count = student_factor(DEGREES) / 2 * np.sqrt(update.unseen / moved)
    floor = np.where(rows & (graded > 0), np.where(moved > 0, by_count, np.nan), floor)
    # With the weights in full, so are the bins: they do not show the sample of the update.
    compared = elementwise & ~missed & (sampling.tables["w"].unseen > 0) & (finite > zeros)
    adaptive = reduced.ranks.get("adaptive", np.ones(1))
    if reduced.bins is None or not (adaptive == 0).any() or not compared.any():
        return floor
    scale = update.expansion[compared] / grad.copies[compared]
    seen = _square_of_bins(reduced, compared) * scale
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.abs(np.sqrt(grad.square[compared] / seen) - 1)
    distance = np.where(np.isfinite(distance), distance, np.nan)
    # A gradient that is not sparse may lie in few elements, too, as that of the bias of a head
    # over a vocabulary; up to there the bins alone may be the reason.
    distance = np.where(rows[compared] | ~(distance <= BIN_ERROR), distance, 0.0)
    floor[compared] = np.maximum(floor[compared], distance)  # NaN where either is
    return floor


def _square_of_bins(reduced: Reduced, rows: NDArray[np.bool_]) -> Column:
    """Return the sum of squares of the gradients that were counted in bins."""
    assert reduced.bins is not None
    extremes = np.abs(reduced.maxima[rows][:, [MAX["g_max"], MAX["g_negmin"]]]).max(
        1
    )  # the outermost bins have no middle
    values = np.abs(bin_values())
    counts = reduced.bins[rows]
    inner = np.isfinite(values)
    square = counts[:, inner] @ values[inner] ** 2
    return np.asarray(square + counts[:, ~inner].sum(1) * extremes**2)

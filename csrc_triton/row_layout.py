"""What one parameter's row of statistics holds, column by column.

Every backend fills these columns and nothing else; everything a record, rule or sink shows is
derived from them after the reduction. SUM columns (float64) are added over ranks, MAX columns
(float32) are maximised, so a row is right under any sharding by construction.

Conventions
- Sums, maxima and bins are over *finite* elements; NaN and Inf are counted in columns of their own.
- Sums of squares are kept in GROUPS separate columns. Sampled run k belongs to group k % GROUPS,
  whichever rank reads it, so the spread between groups gives a standard error that does not depend
  on the sharding.
- The histogram has BINS signed bins in value order. Bin edges are the float32 numbers with
  MANTISSA_BITS mantissa bits, so finding a bin is a shift of the bit pattern.
"""

from __future__ import annotations

from typing import Final

GROUPS: Final = 8
RUN: Final = 8
"""Neighbouring elements read together: 8 float32 are one 32-byte memory sector."""

SCALAR_COLUMNS: Final[tuple[str, ...]] = (
    "holders",  # ranks that hold a piece of the parameter
    "requires_grad",  # holders on which it requires a gradient
    "in_optimizer",  # holders on which an optimizer owns it
    "lr",  # learning rate, added over the ranks whose optimizer owns it
    "w_count",  # sampled weights read
    "w_sum",
    "w_nan",
    "w_inf",
    "g_count",  # sampled gradients read; 0 where there is no gradient
    "g_sum",
    "g_nan",
    "g_inf",
    "g_zero",
    "u_count",  # sampled updates measured; 0 when the step was skipped
    "u_sum",
    "u_graded",  # those of them that have a finite gradient which is not zero
    "u_lost",  # those of these whose weight, itself not zero, did not move
    "u_lost_bound_sq",  # sum over those of (half a unit in the last place)^2
    "whole_count",  # gradient elements read in full on suspicion
    "whole_nonzero",  # how many of those are not zero
    "g_unreadable",  # holders whose gradient is there but sparse, so that it is not read
)
SUM_COLUMNS: Final[tuple[str, ...]] = (
    *SCALAR_COLUMNS,
    *(f"{what}_sq{g}" for what in "wgu" for g in range(GROUPS)),
)
MAX_COLUMNS: Final[tuple[str, ...]] = ("w_absmax", "g_max", "g_negmin", "u_absmax")

SUM: Final[dict[str, int]] = {name: i for i, name in enumerate(SUM_COLUMNS)}
MAX: Final[dict[str, int]] = {name: i for i, name in enumerate(MAX_COLUMNS)}

MANTISSA_BITS: Final = 2
BINS: Final = 512
HALF_BINS: Final = BINS // 2
SMALLEST_EXPONENT: Final = -44
"""Magnitudes below 2**-44 (5.7e-14) share the two middle bins and read as zero."""
KEY_SHIFT: Final = 23 - MANTISSA_BITS
KEY_BASE: Final = ((SMALLEST_EXPONENT + 127) << MANTISSA_BITS) - 1
"""`clamp((bits >> KEY_SHIFT) - KEY_BASE, 0, HALF_BINS - 1)` is the magnitude's bin; the
last one holds everything from 1.5 * 2**19 up and reads as the measured extreme."""
RELATIVE_ERROR: Final = 0.5 / (1 << MANTISSA_BITS)
"""Largest relative distance of a value from the middle of its bin: 12.5%."""

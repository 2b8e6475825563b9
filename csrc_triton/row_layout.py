"""The columns of a parameter's row of statistics.

Every backend fills exactly these columns; records, rules and sinks use values derived from them
after the reduction. SUM columns (float64) are summed over ranks, MAX columns (float32) are
maximized, so a row does not depend on the sharding.

Conventions
- Sums, maxima and bins are over *finite* elements; NaN and Inf are counted in separate columns.
- Sums of squares are kept in GROUPS separate columns. Sampled run k belongs to group k % GROUPS, on
  every rank, so the variance between groups gives a standard error that does not depend on the
  sharding.
- The histogram has BINS signed bins in value order. Bin edges are the float32 numbers with
  MANTISSA_BITS mantissa bits, so finding a bin is a shift of the bit pattern.
- Counts are small integers, so a float64 holds several: word w of a row of `words` words holds the
  counts of bins w, w + words, w + 2 * words, ..., `count_bits(words)` bits each. Sums of words over
  ranks are sums of counts, as long as no count exceeds its bits.
"""

from __future__ import annotations

from typing import Final

GROUPS: Final = 8
RUN: Final = 8
"""Neighboring elements that are read together: 8 float32 are one 32-byte memory sector."""
BY_LANE: Final = 8
"""Added to a run's group in the tables of gradient runs: element j of the run belongs to the group
that is j further than that of its first element."""

SCALAR_COLUMNS: Final[tuple[str, ...]] = (
    "holders",  # ranks that hold a shard of the parameter
    "requires_grad",  # holders on which it requires a gradient
    "in_optimizer",  # holders on which an optimizer owns it
    "lr",  # learning rate, summed over the ranks whose optimizer owns it
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
    "u_graded",  # measured updates with a finite gradient that is not zero
    "u_lost",  # of these, updates of a non-zero weight that did not change
    "u_lost_bound_sq",  # sum over lost updates of (half a unit in the last place)^2
    "whole_count",  # gradient elements that were read in full to confirm a frozen parameter
    "whole_nonzero",  # how many of these are not zero
    "g_unreadable",  # holders whose gradient cannot be read element by element, as a sparse one
)
SUM_COLUMNS: Final[tuple[str, ...]] = (
    *SCALAR_COLUMNS,
    *(f"{what}_sq{g}" for what in "wgu" for g in range(GROUPS)),
)
MAX_COLUMNS: Final[tuple[str, ...]] = ("w_absmax", "g_max", "g_negmin", "u_absmax")

SUM: Final[dict[str, int]] = {name: i for i, name in enumerate(SUM_COLUMNS)}
MAX: Final[dict[str, int]] = {name: i for i, name in enumerate(MAX_COLUMNS)}

MANTISSA_BITS: Final = 1
BINS: Final = 240
PADDED_BINS: Final = 256
"""The next power of two, which is what a Triton block can have."""
HALF_BINS: Final = BINS // 2
SMALLEST_EXPONENT: Final = -44
"""Magnitudes below 2**-44 (5.7e-14) share the two middle bins and read as zero."""
KEY_SHIFT: Final = 23 - MANTISSA_BITS
KEY_BASE: Final = ((SMALLEST_EXPONENT + 127) << MANTISSA_BITS) - 1
"""`clamp((bits >> KEY_SHIFT) - KEY_BASE, 0, HALF_BINS - 1)` is the magnitude's bin; the last one
holds all magnitudes from 2**15 on and is read as the measured extreme."""
BIN_WIDTH: Final = 1 / (1 << MANTISSA_BITS)
"""Maximum width of a bin, relative to the values in it: 50%."""

BIN_WORDS: Final = tuple(BINS // counts for counts in (3, 2, 1))
"""Into how many words the bins of a row can be packed."""
_EXACT_BITS: Final = 52
"""Integers of so many bits are exact in float64, and so are their sums up to the next bit."""


def count_bits(words: int) -> int:
    """Return the bits of each count where the bins of a row are packed into `words` words."""
    return _EXACT_BITS // (BINS // words)


def bin_words(most: int) -> int:
    """Return the fewest words that hold the bins of a row in which no count exceeds `most`."""
    return next((words for words in BIN_WORDS if most < 1 << count_bits(words)), BINS)

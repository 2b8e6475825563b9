"""A line of partial results for each chunk of a tensor, and their sum in a fixed order.

A line holds PARTIAL_COLUMNS, then sums of squares: one over everything, or one by group.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

PARTIAL_COLUMNS: Final[tuple[str, ...]] = ("sum", "nan", "inf", "zero", "high", "low")
"""The first ones are in the order of the SUM columns, the last two in that of the MAX columns."""

P_HIGH: tl.constexpr = tl.constexpr(PARTIAL_COLUMNS.index("high"))
P_SQUARES: tl.constexpr = tl.constexpr(len(PARTIAL_COLUMNS))


@triton.jit
def store_partials(p_line, b_sum, b_flags, b_high, b_low):
    """Store all but the squares of a program's running values; see `add_block`."""
    tl.store(p_line, tl.sum(b_sum))
    tl.store(p_line + 1, tl.sum(b_flags & 0x3FF).to(tl.float64))
    tl.store(p_line + 2, tl.sum((b_flags >> 10) & 0x3FF).to(tl.float64))
    tl.store(p_line + 3, tl.sum(b_flags >> 20).to(tl.float64))
    tl.store(p_line + 4, tl.max(b_high).to(tl.float64))
    tl.store(p_line + 5, tl.max(b_low).to(tl.float64))


@triton.jit
def combine_partials(
    p_partials, first, last, WIDTH: tl.constexpr, USED: tl.constexpr, LINES: tl.constexpr
):
    """Sums and maxima of all partial columns over chunks first..last, in a fixed order."""
    o_column = tl.arange(0, WIDTH)[None, :]
    b_sum = tl.zeros((LINES, WIDTH), tl.float64)
    b_top = tl.full((LINES, WIDTH), float("-inf"), tl.float64)
    for c in range(first, last, LINES):
        o_line = (c + tl.arange(0, LINES))[:, None]
        m_line = (o_line < last) & (o_column < USED)
        b_part = tl.load(p_partials + o_line * WIDTH + o_column, mask=m_line, other=0)
        b_sum += b_part
        b_top = tl.maximum(b_top, tl.where(m_line, b_part, float("-inf")))
    return tl.sum(b_sum, 0), tl.max(b_top, 0)

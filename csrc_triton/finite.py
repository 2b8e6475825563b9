"""Add up blocks of elements: finite ones are summed, NaN, Inf and zero are counted."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_finite(b_value):
    """False for NaN and for both infinities: their difference from themselves is NaN."""
    return b_value - b_value == 0


@triton.jit
def times(factor, value):
    """`value` counted `factor` times; 0 where nothing was measured, even if `value` overflowed."""
    return tl.where(factor > 0, value * factor, 0.0)


@triton.jit
def add_block(b_x, m_read, b_sum, b_flags, b_high, b_low):
    """Add one block to the running values of every thread; masked elements add nothing.

    Also returns the elements with 0 for what is not finite, in their own type and in fp64, and
    which of them are finite and read. NaN, Inf and zero are counted in fields of 10 bits, so a
    program may add up to 1023 blocks.
    """
    m_finite = is_finite(b_x)
    b_flags += (b_x != b_x).to(tl.int32) + (((b_x == b_x) & ~m_finite).to(tl.int32) << 10)
    b_flags += ((b_x == 0) & m_read).to(tl.int32) << 20
    b_x = tl.where(m_finite, b_x, 0.0)
    m_finite &= m_read
    b_high = tl.maximum(b_high, tl.where(m_finite, b_x, float("-inf")))
    b_low = tl.maximum(b_low, tl.where(m_finite, -b_x, float("-inf")))
    b_wide = b_x.to(tl.float64)
    return b_sum + b_wide, b_flags, b_high, b_low, b_x, b_wide, m_finite

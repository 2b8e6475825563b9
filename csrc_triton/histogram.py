"""The signed log-spaced bin of a value: a shift of its fp32 bit pattern."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from csrc_triton.row_layout import HALF_BINS, KEY_BASE, KEY_SHIFT

_HALF_BINS: tl.constexpr = tl.constexpr(HALF_BINS)
_KEY_BASE: tl.constexpr = tl.constexpr(KEY_BASE)
_KEY_SHIFT: tl.constexpr = tl.constexpr(KEY_SHIFT)


@triton.jit
def signed_bin(b_value):
    """Return the bin of each finite value as int32; bins are in increasing order of value."""
    b_bits = b_value.to(tl.float32).to(tl.int32, bitcast=True)
    b_key = ((b_bits & 0x7FFFFFFF) >> _KEY_SHIFT) - _KEY_BASE
    b_key = tl.minimum(tl.maximum(b_key, 0), _HALF_BINS - 1)
    return tl.where(b_bits < 0, _HALF_BINS - 1 - b_key, _HALF_BINS + b_key)

"""The signed log-spaced bin of a value, a shift of its fp32 bit pattern, and packed counts."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from csrc_triton.row_layout import (
    BINS,
    HALF_BINS,
    KEY_BASE,
    KEY_SHIFT,
    PADDED_BINS,
    count_bits,
)

_HALF_BINS: tl.constexpr = tl.constexpr(HALF_BINS)
_KEY_BASE: tl.constexpr = tl.constexpr(KEY_BASE)
_KEY_SHIFT: tl.constexpr = tl.constexpr(KEY_SHIFT)
_BINS: tl.constexpr = tl.constexpr(BINS)
_PADDED_BINS: tl.constexpr = tl.constexpr(PADDED_BINS)


@triton.jit
def signed_bin(b_value):
    """Return the bin of each finite value as int32; bins are in increasing order of value."""
    b_bits = b_value.to(tl.float32).to(tl.int32, bitcast=True)
    b_key = ((b_bits & 0x7FFFFFFF) >> _KEY_SHIFT) - _KEY_BASE
    b_key = tl.minimum(tl.maximum(b_key, 0), _HALF_BINS - 1)
    return tl.where(b_bits < 0, _HALF_BINS - 1 - b_key, _HALF_BINS + b_key)


def count_constants(words: int) -> dict[str, int]:
    """Return the constants with which a kernel packs the bins of a row; `words` 0: it has none."""
    return {"WORDS": words, "COUNT_BITS": count_bits(words) if words else 0}


@triton.jit
def padded_words(WORDS: tl.constexpr):
    """Return the offsets of the words of a row, up to the next power of two."""
    return tl.arange(0, 128 if WORDS <= 128 else 256)


@triton.jit
def packed(b_counts, o_word, WORDS: tl.constexpr, COUNT_BITS: tl.constexpr):
    """Pack int32 counts of PADDED_BINS bins into float64 words."""
    b_words = tl.zeros_like(o_word).to(tl.int64)
    for place in tl.static_range(_BINS // WORDS):
        o_bin = tl.minimum(place * WORDS + o_word, _PADDED_BINS - 1)
        b_words += tl.gather(b_counts, o_bin, 0).to(tl.int64) << (place * COUNT_BITS)
    return b_words.to(tl.float64)

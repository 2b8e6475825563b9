"""All sampled columns of all parameters in one launch: weights, gradients and updates read once.

One program fills one row. It walks the row's slots as [GROUPS, BLOCK_W] tiles, so that a sum along
a tile's second axis is the sum of a group. Every reduction is a fixed tree and there are no atomics
on floats: the same inputs give the same bits.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from csrc_triton.dtypes import load_values
from csrc_triton.finite import is_finite, times
from csrc_triton.histogram import count_constants, packed, padded_words, signed_bin
from csrc_triton.row_layout import GROUPS, MAX, MAX_COLUMNS, PADDED_BINS, SUM, SUM_COLUMNS
from csrc_triton.tables import (
    A_COLUMNS,
    A_GRAD,
    A_GRAD_CODE,
    A_GRAD_OFFSETS,
    A_WEIGHT,
    A_WEIGHT_CODE,
    A_WEIGHT_OFFSETS,
    OFFSET_TYPES,
    SAMPLED_WARPS,
    VALUE_TYPES,
    RowOutputs,
    RowTables,
    check,
    register_limit,
)

STATS_BLOCK_WIDTH: Final = 16
"""One element per thread and pass: twice that needs 128 registers."""
REGISTER_LIMITS: Final[dict[torch.dtype, int]] = {torch.float32: 64, torch.float64: 96}
"""On NVIDIA, by the dtype of kept samples: without it ptxas takes up to 72, with 64 it still does
not spill; fp64 samples spill at 64."""
MAX_SLOTS_PER_GROUP: Final = STATS_BLOCK_WIDTH << 15
"""Flags are counted in 16-bit halves: more passes than 2**15 could overflow them."""

_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_PADDED_BINS: tl.constexpr = tl.constexpr(PADDED_BINS)
_SUMS: tl.constexpr = tl.constexpr(len(SUM_COLUMNS))
_MAXIMA: tl.constexpr = tl.constexpr(len(MAX_COLUMNS))
_FIRST_OWN: tl.constexpr = tl.constexpr(SUM["w_count"])
_WHOLE: tl.constexpr = tl.constexpr(SUM["whole_count"])
_W_COUNT: tl.constexpr = tl.constexpr(SUM["w_count"])
_W_SUM: tl.constexpr = tl.constexpr(SUM["w_sum"])
_W_NAN: tl.constexpr = tl.constexpr(SUM["w_nan"])
_W_INF: tl.constexpr = tl.constexpr(SUM["w_inf"])
_G_COUNT: tl.constexpr = tl.constexpr(SUM["g_count"])
_G_SUM: tl.constexpr = tl.constexpr(SUM["g_sum"])
_G_NAN: tl.constexpr = tl.constexpr(SUM["g_nan"])
_G_INF: tl.constexpr = tl.constexpr(SUM["g_inf"])
_G_ZERO: tl.constexpr = tl.constexpr(SUM["g_zero"])
_U_COUNT: tl.constexpr = tl.constexpr(SUM["u_count"])
_U_SUM: tl.constexpr = tl.constexpr(SUM["u_sum"])
_U_GRADED: tl.constexpr = tl.constexpr(SUM["u_graded"])
_G_UNREADABLE: tl.constexpr = tl.constexpr(SUM["g_unreadable"])
_U_LOST: tl.constexpr = tl.constexpr(SUM["u_lost"])
_U_BOUND: tl.constexpr = tl.constexpr(SUM["u_lost_bound_sq"])
_W_SQ: tl.constexpr = tl.constexpr(SUM["w_sq0"])
_G_SQ: tl.constexpr = tl.constexpr(SUM["g_sq0"])
_U_SQ: tl.constexpr = tl.constexpr(SUM["u_sq0"])
_W_ABSMAX: tl.constexpr = tl.constexpr(MAX["w_absmax"])
_G_MAX: tl.constexpr = tl.constexpr(MAX["g_max"])
_G_NEGMIN: tl.constexpr = tl.constexpr(MAX["g_negmin"])
_U_ABSMAX: tl.constexpr = tl.constexpr(MAX["u_absmax"])
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)


@triton.jit
def odd_multiplier(o_slot):
    """The fixed odd 64-bit number of each slot. Computed: a table would double the bytes read."""
    b_z = (o_slot + 1).to(tl.uint64) * _GOLDEN
    return (((b_z ^ (b_z >> 29)) * _MIX) | 1).to(tl.int64)


@triton.jit
def flags(m_low, m_high):
    """Two flags in the halves of an int32, to be counted by one addition."""
    return m_low.to(tl.int32) + (m_high.to(tl.int32) << 16)


@triton.jit
def count_low(b_flags):
    return tl.sum(tl.sum(b_flags & 0xFFFF, 1), 0).to(tl.float64)


@triton.jit
def count_high(b_flags):
    return tl.sum(tl.sum(b_flags >> 16, 1), 0).to(tl.float64)


@triton.jit
def total(b_value):
    return tl.sum(tl.sum(b_value, 1), 0)


@triton.jit
def largest(b_value):
    return tl.max(tl.max(b_value, 1), 0)


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def sampled_stats_kernel(
    p_addresses,
    p_starts,
    p_widths,
    p_group_counts,
    p_half_ulp,
    p_snapshot,
    p_applied,
    p_sums,
    p_maxima,
    p_bins,
    p_checksums,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_addresses + row * A_COLUMNS
    weight = tl.load(p_row + A_WEIGHT)
    weight_code = tl.load(p_row + A_WEIGHT_CODE)
    weight_offsets = tl.load(p_row + A_WEIGHT_OFFSETS)
    grad = tl.load(p_row + A_GRAD)
    grad_code = tl.load(p_row + A_GRAD_CODE)
    grad_offsets = tl.load(p_row + A_GRAD_OFFSETS)
    p_kept = p_snapshot + tl.load(p_starts + row)
    width = tl.load(p_widths + row)
    o_group = tl.arange(0, _GROUPS)
    b_counts = tl.load(p_group_counts + row * _GROUPS + o_group)

    # Every thread adds up its own elements and the tree comes after the loop: reducing inside it
    # took 240 registers instead of 64. Sums are fp64 because fp32 squares under- and overflow.
    lowest: tl.constexpr = float("-inf")
    b_w_sum = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_g_sum = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_u_sum = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_w_sq = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_g_sq = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_u_sq = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_bound = tl.zeros((_GROUPS, BLOCK_W), tl.float64)
    b_checksum = tl.zeros((_GROUPS, BLOCK_W), tl.int64)
    b_w_bad = tl.zeros((_GROUPS, BLOCK_W), tl.int32)
    b_g_bad = tl.zeros((_GROUPS, BLOCK_W), tl.int32)
    b_zero_lost = tl.zeros((_GROUPS, BLOCK_W), tl.int32)
    b_w_absmax = tl.full((_GROUPS, BLOCK_W), lowest, VALUE)
    b_g_max = tl.full((_GROUPS, BLOCK_W), lowest, VALUE)
    b_g_negmin = tl.full((_GROUPS, BLOCK_W), lowest, VALUE)
    b_u_absmax = tl.full((_GROUPS, BLOCK_W), lowest, VALUE)
    b_bins = tl.zeros((_PADDED_BINS,), tl.int32)

    for first in range(0, width, BLOCK_W):
        o_column = first + tl.arange(0, BLOCK_W)
        o_slot = o_group[:, None] * width + o_column[None, :]
        m_used = o_column[None, :] < b_counts[:, None]
        p_offsets = weight_offsets.to(tl.pointer_type(OFFSET))
        o_element = tl.load(p_offsets + o_slot, mask=m_used, other=0)
        b_w = load_values(weight, weight_code, o_element, m_used, DTYPES, VALUE)
        if grad_offsets != weight_offsets:
            p_offsets = grad_offsets.to(tl.pointer_type(OFFSET))
            o_element = tl.load(p_offsets + o_slot, mask=m_used, other=0)
        m_grad = m_used & (grad != 0)
        b_g = load_values(grad, grad_code, o_element, m_grad, DTYPES, VALUE)
        b_before = tl.load(p_kept + o_slot, mask=m_used, other=0)

        if tl.float64 == VALUE:
            b_bits = b_w.to(tl.int64, bitcast=True)
        else:
            b_bits = b_w.to(tl.int32, bitcast=True).to(tl.int64)
        # By column, then group: the number of a slot must not depend on how wide the row is here.
        o_number = o_column[None, :] * _GROUPS + o_group[:, None]
        b_checksum += b_bits * odd_multiplier(o_number)

        m_w = is_finite(b_w)
        b_w_bad += flags(b_w != b_w, (b_w == b_w) & ~m_w)
        b_w = tl.where(m_w, b_w, 0.0)
        m_w &= m_used
        b_w_absmax = tl.maximum(b_w_absmax, tl.where(m_w, tl.abs(b_w), lowest))
        b_wide = b_w.to(tl.float64)
        b_w_sum += b_wide
        b_w_sq += b_wide * b_wide

        m_g = is_finite(b_g)
        b_g_bad += flags(b_g != b_g, (b_g == b_g) & ~m_g)
        b_g = tl.where(m_g, b_g, 0.0)
        m_g &= m_used
        b_g_max = tl.maximum(b_g_max, tl.where(m_g, b_g, lowest))
        b_g_negmin = tl.maximum(b_g_negmin, tl.where(m_g, -b_g, lowest))
        b_wide = b_g.to(tl.float64)
        b_g_sum += b_wide
        b_g_sq += b_wide * b_wide

        b_u = b_w - b_before
        b_u = tl.where(is_finite(b_u) & m_w, b_u, 0.0)
        b_u_absmax = tl.maximum(b_u_absmax, tl.abs(b_u))
        b_wide = b_u.to(tl.float64)
        b_u_sum += b_wide
        b_u_sq += b_wide * b_wide

        m_lost = (b_g != 0) & (b_w != 0) & (b_u == 0)
        b_zero_lost += flags(m_g & (b_g == 0), m_lost)
        # The exponent bits alone are the power of two at or below |w|; times the dtype's half ulp
        # of 1.0 that is the largest update rounding can swallow.
        if tl.float64 == VALUE:
            b_power = b_w.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        else:
            b_power = b_w.to(tl.int32, bitcast=True) & 0x7F800000
        b_power = tl.where(m_lost, b_power, 0).to(VALUE, bitcast=True).to(tl.float64)
        b_bound += b_power * b_power

        if WORDS:
            b_bin = tl.reshape(signed_bin(b_g), (_GROUPS * BLOCK_W,))
            m_counted = tl.reshape(m_g, (_GROUPS * BLOCK_W,))
            b_bins += tl.histogram(b_bin, _PADDED_BINS, mask=m_counted)

    taken = tl.load(p_applied + row)
    graded = tl.where(grad != 0, taken, 0.0)
    half_ulp = tl.load(p_half_ulp + row)
    used = tl.sum(b_counts, 0).to(tl.float64)
    p_sum = p_sums + row * _SUMS
    # Columns that other code fills start at zero, as after Rows.clear().
    o_other = tl.arange(0, _FIRST_OWN)
    tl.store(p_sum + o_other, tl.zeros((_FIRST_OWN,), tl.float64))
    tl.store(p_sum + _WHOLE + tl.arange(0, 2), tl.zeros((2,), tl.float64))
    tl.store(p_sum + _G_UNREADABLE, 0.0)
    tl.store(p_sum + _W_COUNT, used)
    tl.store(p_sum + _W_SUM, total(b_w_sum))
    tl.store(p_sum + _W_NAN, count_low(b_w_bad))
    tl.store(p_sum + _W_INF, count_high(b_w_bad))
    tl.store(p_sum + _G_COUNT, used * graded)
    tl.store(p_sum + _G_SUM, times(graded, total(b_g_sum)))
    tl.store(p_sum + _G_NAN, count_low(b_g_bad) * graded)
    tl.store(p_sum + _G_INF, count_high(b_g_bad) * graded)
    tl.store(p_sum + _G_ZERO, count_low(b_zero_lost) * graded)
    tl.store(p_sum + _U_COUNT, used * taken)
    tl.store(p_sum + _U_SUM, times(taken, total(b_u_sum)))
    nonzero = used - count_low(b_g_bad) - count_high(b_g_bad) - count_low(b_zero_lost)
    tl.store(p_sum + _U_GRADED, nonzero * graded)
    tl.store(p_sum + _U_LOST, count_high(b_zero_lost) * graded)
    tl.store(p_sum + _U_BOUND, times(graded, total(b_bound) * (half_ulp * half_ulp)))
    tl.store(p_sum + _W_SQ + o_group, tl.sum(b_w_sq, 1))
    tl.store(p_sum + _G_SQ + o_group, times(graded, tl.sum(b_g_sq, 1)))
    tl.store(p_sum + _U_SQ + o_group, times(taken, tl.sum(b_u_sq, 1)))
    p_max = p_maxima + row * _MAXIMA
    tl.store(p_max + _W_ABSMAX, largest(b_w_absmax).to(tl.float32))
    tl.store(p_max + _G_MAX, tl.where(graded > 0, largest(b_g_max), lowest).to(tl.float32))
    tl.store(p_max + _G_NEGMIN, tl.where(graded > 0, largest(b_g_negmin), lowest).to(tl.float32))
    tl.store(p_max + _U_ABSMAX, tl.where(taken > 0, largest(b_u_absmax), lowest).to(tl.float32))
    tl.store(p_checksums + row, total(b_checksum))
    if WORDS:
        o_word = padded_words(WORDS)
        b_words = packed(b_bins, o_word, WORDS, COUNT_BITS)
        tl.store(p_bins + row * WORDS + o_word, b_words * graded, mask=o_word < WORDS)


def fill_sampled_rows(
    tables: RowTables,
    applied: torch.Tensor,
    outputs: RowOutputs,
    dtypes: int,
) -> None:
    """Fill every column of every row from the weights, gradients and snapshot.

    `applied` is float64 [parameters]: 1 where the optimizer stepped the parameter, else 0; `dtypes`
    is the `dtype_set` of all weights and gradients. Rows of parameters that are not here become the
    rows that add nothing. Allocates nothing and does not wait.
    """
    rows = len(tables)
    check("applied", applied, torch.float64, (rows,), tables.device)
    outputs.verify(rows, tables.device)
    if tables.widest > MAX_SLOTS_PER_GROUP:
        raise ValueError(
            f"a row has {tables.widest * GROUPS} samples; the kernel supports at most "
            f"{MAX_SLOTS_PER_GROUP * GROUPS}"
        )
    if not rows:
        return
    sampled_stats_kernel[(rows,)](
        tables.addresses,
        tables.starts,
        tables.widths,
        tables.group_counts,
        tables.half_ulp,
        tables.snapshot,
        applied,
        outputs.sums,
        outputs.maxima,
        outputs.sums if outputs.bins is None else outputs.bins,
        outputs.checksums,
        DTYPES=dtypes,
        VALUE=VALUE_TYPES[tables.snapshot.dtype],
        OFFSET=OFFSET_TYPES[tables.offset_dtype],
        **count_constants(outputs.words),
        BLOCK_W=STATS_BLOCK_WIDTH,
        num_warps=SAMPLED_WARPS,
        **register_limit(REGISTER_LIMITS[tables.snapshot.dtype]),
    )

"""Weight and gradient columns over every element: one launch over chunks of all parameters.

Program (c, side) adds up chunk c of the weight (side 0) or gradient (side 1) into a line of
partials; a second tiny launch adds a row's partials in a fixed order. Sums are fp64 in both, with
chains of at most CHUNK / BLOCK + chunks / LINES additions, so 10**9 elements lose fewer than 9 bits
of fp64. Bins are added by integer atomics, which give the same counts in any order.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A constant and a value on the device cannot be joined by `and`: the outer `if` is static.
# ruff: noqa: SIM102
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from csrc_triton.dtypes import load_values
from csrc_triton.histogram import signed_bin
from csrc_triton.row_layout import BINS, GROUPS, MAX, MAX_COLUMNS, SUM, SUM_COLUMNS
from csrc_triton.sampled_stats import is_finite, times
from csrc_triton.tables import (
    A_COLUMNS,
    A_GRAD,
    A_WEIGHT,
    VALUE_TYPES,
    RowOutputs,
    check,
)

CHUNK: Final = 1 << 16
"""Elements of one program: 64 passes, so that the unaligned edges are under 2% of the work."""
BLOCK: Final = 1024
WARPS: Final = 4
CHUNK_REGISTERS: Final = 200
ROW_REGISTERS: Final = 128
"""Limits on NVIDIA. Left alone, ptxas stops at 168 and 48 registers and spills 8 to 16 bytes."""
LINES: Final = 64
PARTIALS: Final = 8
"""sum, squares, NaN, Inf, zeros, largest, largest negated, and one to make it 64 bytes."""

_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_BINS: tl.constexpr = tl.constexpr(BINS)
_PARTIALS: tl.constexpr = tl.constexpr(PARTIALS)
_SUMS: tl.constexpr = tl.constexpr(len(SUM_COLUMNS))
_MAXIMA: tl.constexpr = tl.constexpr(len(MAX_COLUMNS))
_W_COUNT: tl.constexpr = tl.constexpr(SUM["w_count"])
_G_COUNT: tl.constexpr = tl.constexpr(SUM["g_count"])
_W_SQ: tl.constexpr = tl.constexpr(SUM["w_sq0"])
_G_SQ: tl.constexpr = tl.constexpr(SUM["g_sq0"])
_W_ABSMAX: tl.constexpr = tl.constexpr(MAX["w_absmax"])
_G_MAX: tl.constexpr = tl.constexpr(MAX["g_max"])


@triton.jit
def add_block(b_x, m_read, b_sum, b_sq, b_flags, b_high, b_low):
    """Add one block to the running values of every thread; masked elements add nothing."""
    m_finite = is_finite(b_x)
    # NaN, Inf and zero are counted in 10-bit fields: there are at most 66 blocks in a chunk.
    b_flags += (b_x != b_x).to(tl.int32) + (((b_x == b_x) & ~m_finite).to(tl.int32) << 10)
    b_flags += ((b_x == 0) & m_read).to(tl.int32) << 20
    b_x = tl.where(m_finite, b_x, 0.0)
    m_finite &= m_read
    b_high = tl.maximum(b_high, tl.where(m_finite, b_x, float("-inf")))
    b_low = tl.maximum(b_low, tl.where(m_finite, -b_x, float("-inf")))
    b_wide = b_x.to(tl.float64)
    return b_sum + b_wide, b_sq + b_wide * b_wide, b_flags, b_high, b_low, b_x, m_finite


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5])
def exact_chunks_kernel(
    p_addresses,
    p_numels,
    p_chunk_rows,
    p_first_chunks,
    p_partials,
    p_counts,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1).to(tl.int64)
    row = tl.load(p_chunk_rows + chunk).to(tl.int64)
    start = (chunk - tl.load(p_first_chunks + row)) * CHUNK
    length = tl.minimum(tl.load(p_numels + row) - start, CHUNK).to(tl.int32)
    p_row = p_addresses + row * A_COLUMNS + side * (A_GRAD - A_WEIGHT)
    address = tl.load(p_row)
    code = tl.load(p_row + 1)
    length = tl.where(address == 0, 0, length)
    # Bytes per element as a shift, by dtype code: fp32, bf16, fp16, fp64, e4m3, e5m2.
    shift = tl.where(code == 3, 3, tl.where(code == 0, 2, tl.where(code < 3, 1, 0)))
    begin = address + (start << shift)
    # Elements before the first 16-byte boundary: a gradient in a bucket starts anywhere.
    head = tl.minimum((((16 - (begin & 15)) & 15) >> shift).to(tl.int32), length)
    blocks = (length - head) // BLOCK
    aligned = begin + (head.to(tl.int64) << shift)
    step = tl.full((), BLOCK, tl.int64) << shift
    tail = head + blocks * BLOCK

    o_lane = tl.arange(0, BLOCK)
    b_sum = tl.zeros((BLOCK,), tl.float64)
    b_sq = tl.zeros((BLOCK,), tl.float64)
    b_flags = tl.zeros((BLOCK,), tl.int32)
    b_high = tl.full((BLOCK,), float("-inf"), VALUE)
    b_low = tl.full((BLOCK,), float("-inf"), VALUE)
    b_bins = tl.zeros((_BINS,), tl.int32)
    m_all = tl.full((BLOCK,), 1, tl.int1)

    for _ in range(blocks):
        # Without a mask and with a known alignment these become 128-bit loads.
        b_x = load_values(aligned, code, o_lane, None, DTYPES, VALUE)
        aligned += step
        b_sum, b_sq, b_flags, b_high, b_low, b_x, m_x = add_block(
            b_x, m_all, b_sum, b_sq, b_flags, b_high, b_low
        )
        if HISTOGRAM:
            if side == 1:
                b_bins += tl.histogram(signed_bin(b_x), _BINS, mask=m_x)
    edge = length - blocks * BLOCK
    for first in range(0, edge, BLOCK):
        # Head and tail together: lanes below `head` read the beginning, the others the end.
        o_edge = first + o_lane
        m_edge = o_edge < edge
        o_element = tl.where(o_edge < head, o_edge, tail + (o_edge - head))
        b_x = load_values(begin, code, o_element, m_edge, DTYPES, VALUE)
        b_sum, b_sq, b_flags, b_high, b_low, b_x, m_x = add_block(
            b_x, m_edge, b_sum, b_sq, b_flags, b_high, b_low
        )
        if HISTOGRAM:
            if side == 1:
                b_bins += tl.histogram(signed_bin(b_x), _BINS, mask=m_x)

    p_line = p_partials + (side * tl.num_programs(0) + chunk) * _PARTIALS
    tl.store(p_line, tl.sum(b_sum, 0))
    tl.store(p_line + 1, tl.sum(b_sq, 0))
    tl.store(p_line + 2, tl.sum(b_flags & 0x3FF, 0).to(tl.float64))
    tl.store(p_line + 3, tl.sum((b_flags >> 10) & 0x3FF, 0).to(tl.float64))
    tl.store(p_line + 4, tl.sum(b_flags >> 20, 0).to(tl.float64))
    tl.store(p_line + 5, tl.max(b_high, 0).to(tl.float64))
    tl.store(p_line + 6, tl.max(b_low, 0).to(tl.float64))
    if HISTOGRAM:
        if side == 1:
            p_count = p_counts + row * _BINS + tl.arange(0, _BINS)
            tl.atomic_add(p_count, b_bins.to(tl.int64), mask=b_bins > 0, sem="relaxed")


@triton.jit
def combine_partials(p_partials, first, last, LINES: tl.constexpr):
    """Sums and maxima of all partial columns over chunks first..last, in a fixed order."""
    o_column = tl.arange(0, _PARTIALS)[None, :]
    b_sum = tl.zeros((LINES, _PARTIALS), tl.float64)
    b_top = tl.full((LINES, _PARTIALS), float("-inf"), tl.float64)
    for c in range(first, last, LINES):
        o_line = (c + tl.arange(0, LINES))[:, None]
        m_line = (o_line < last) & (o_column < _PARTIALS - 1)
        b_part = tl.load(p_partials + o_line * _PARTIALS + o_column, mask=m_line, other=0)
        b_sum += b_part
        b_top = tl.maximum(b_top, tl.where(m_line, b_part, float("-inf")))
    return tl.sum(b_sum, 0), tl.max(b_top, 0)


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5, 6, 7, 8], do_not_specialize=[9])
def exact_rows_kernel(
    p_addresses,
    p_numels,
    p_first_chunks,
    p_partials,
    p_counts,
    p_applied,
    p_sums,
    p_maxima,
    p_bins,
    chunks,
    HISTOGRAM: tl.constexpr,
    LINES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numel = tl.load(p_numels + row).to(tl.float64)
    p_sum = p_sums + row * _SUMS
    p_max = p_maxima + row * _MAXIMA
    first = tl.load(p_first_chunks + row)
    last = tl.load(p_first_chunks + row + 1)
    o_group = tl.arange(0, _GROUPS)

    o_part = tl.arange(0, _PARTIALS)
    m_extreme = (o_part == 5) | (o_part == 6)
    # Partial columns go to sum, squares, NaN, Inf, zeros; those but the squares are neighbours.
    o_after_count = tl.where(o_part == 0, 1, o_part)

    b_sum, b_top = combine_partials(p_partials, first, last, LINES)
    tl.store(p_sum + _W_COUNT, numel)
    o_sum = tl.where(o_part == 1, _W_SQ, _W_COUNT + o_after_count)
    tl.store(p_sum + o_sum, b_sum, mask=o_part < 4)
    # The whole sum is known: all of it is in the first group.
    tl.store(p_sum + _W_SQ + o_group, tl.zeros((_GROUPS,), tl.float64), mask=o_group > 0)
    w_absmax = tl.max(tl.where(m_extreme, b_top, float("-inf")), 0)
    tl.store(p_max + _W_ABSMAX, w_absmax.to(tl.float32))

    p_partials += chunks.to(tl.int64) * _PARTIALS
    has_grad = tl.load(p_addresses + row * A_COLUMNS + A_GRAD) != 0
    graded = tl.where(has_grad, tl.load(p_applied + row), 0.0)
    b_sum, b_top = combine_partials(p_partials, first, last, LINES)
    tl.store(p_sum + _G_COUNT, numel * graded)
    o_sum = tl.where(o_part == 1, _G_SQ, _G_COUNT + o_after_count)
    tl.store(p_sum + o_sum, times(graded, b_sum), mask=o_part < 5)
    tl.store(p_sum + _G_SQ + o_group, tl.zeros((_GROUPS,), tl.float64), mask=o_group > 0)
    b_top = tl.where(graded > 0, b_top, float("-inf")).to(tl.float32)
    tl.store(p_max + _G_MAX + o_part - 5, b_top, mask=m_extreme)
    if HISTOGRAM:
        o_bin = row * _BINS + tl.arange(0, _BINS)
        b_count = tl.load(p_counts + o_bin)
        tl.store(p_bins + o_bin, b_count.to(tl.float64) * graded)
        # Ready for the next observation, so that nothing else has to clear them.
        tl.store(p_counts + o_bin, tl.zeros((_BINS,), tl.int64))


@dataclass(frozen=True)
class ExactTables:
    """Chunks of all parameters and the scratch that their partials go to."""

    numels: torch.Tensor
    """int64 [parameters]: elements held here."""
    chunk_rows: torch.Tensor
    """int32 [chunks]"""
    first_chunks: torch.Tensor
    """int64 [parameters + 1]"""
    partials: torch.Tensor
    """float64 [2, chunks, PARTIALS]"""
    counts: torch.Tensor
    """int64 [parameters, BINS], zero between launches; [0, BINS] for no histogram."""

    @classmethod
    def build(
        cls, numels: Sequence[int], device: torch.device, histogram: bool = True
    ) -> ExactTables:
        """Cut parameters with these numbers of local elements into chunks."""
        sizes = torch.tensor(numels, dtype=torch.int64)
        per_row = (sizes + CHUNK - 1) // CHUNK
        first = torch.cat((torch.zeros(1, dtype=torch.int64), per_row.cumsum(0)))
        rows = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), per_row)
        return cls(
            numels=sizes.to(device),
            chunk_rows=rows.to(device),
            first_chunks=first.to(device),
            partials=torch.empty((2, len(rows), PARTIALS), dtype=torch.float64, device=device),
            counts=torch.zeros(
                (len(sizes) if histogram else 0, BINS), dtype=torch.int64, device=device
            ),
        )


def fill_exact_columns(
    tables: ExactTables,
    addresses: torch.Tensor,
    applied: torch.Tensor,
    outputs: RowOutputs,
    dtypes: int,
    value_dtype: torch.dtype,
) -> None:
    """Overwrite the weight and gradient columns by those over every element.

    `addresses` is the address table of the same parameters, whose tensors must each be one dense
    piece of memory; `value_dtype` is float32, or float64 when a tensor is. Allocates nothing and
    does not wait.
    """
    rows, device = len(tables.numels), tables.numels.device
    check("addresses", addresses, torch.int64, (rows, A_COLUMNS.value), device)
    check("applied", applied, torch.float64, (rows,), device)
    outputs.verify(rows, device)
    if value_dtype not in VALUE_TYPES:
        raise TypeError(f"value_dtype must be float32 or float64, not {value_dtype}")
    if outputs.bins is not None and len(tables.counts) != rows:
        raise ValueError("the exact tables were built without a histogram, but bins were given")
    if not rows:
        return
    chunks = len(tables.chunk_rows)
    histogram = outputs.bins is not None
    if chunks:
        exact_chunks_kernel[(chunks, 2)](
            addresses,
            tables.numels,
            tables.chunk_rows,
            tables.first_chunks,
            tables.partials,
            tables.counts,
            DTYPES=dtypes,
            VALUE=VALUE_TYPES[value_dtype],
            HISTOGRAM=histogram,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **({} if torch.version.hip else {"maxnreg": CHUNK_REGISTERS}),
        )
    exact_rows_kernel[(rows,)](
        addresses,
        tables.numels,
        tables.first_chunks,
        tables.partials,
        tables.counts,
        applied,
        outputs.sums,
        outputs.maxima,
        outputs.sums if outputs.bins is None else outputs.bins,
        chunks,
        HISTOGRAM=histogram,
        LINES=LINES,
        num_warps=WARPS,
        **({} if torch.version.hip else {"maxnreg": ROW_REGISTERS}),
    )

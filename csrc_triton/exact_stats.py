"""Columns over every element of chosen weights and gradients: one launch over chunks of them all.

A program adds up one chunk of one tensor into a line of partials; a second tiny launch adds a
tensor's partials in a fixed order. Sums are fp64 in both, with chains of at most
CHUNK / BLOCK + chunks / LINES additions, so 10**9 elements lose fewer than 9 bits of fp64. Bins are
added by integer atomics, which give the same counts in any order.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A constant and a value on the device cannot be joined by `and`: the outer `if` is static.
# ruff: noqa: SIM102
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from csrc_triton.chunk_places import load_edge, place_chunk
from csrc_triton.dtypes import load_values
from csrc_triton.finite import add_block, times
from csrc_triton.histogram import count_constants, padded_words, signed_bin
from csrc_triton.partials import (
    P_HIGH,
    P_SQUARES,
    PARTIAL_COLUMNS,
    combine_partials,
    store_partials,
)
from csrc_triton.row_layout import (
    BINS,
    GROUPS,
    MAX,
    MAX_COLUMNS,
    PADDED_BINS,
    SUM,
    SUM_COLUMNS,
)
from csrc_triton.tables import (
    A_COLUMNS,
    A_GRAD,
    VALUE_TYPES,
    RowOutputs,
    check,
    cut_into_chunks,
    register_limit,
    upload,
    verify_launch,
)

CHUNK: Final = 1 << 16
"""Elements of one program: 64 passes, so that the unaligned edges are under 2% of the work."""
BLOCK: Final = 1024
WARPS: Final = 4
ROW_REGISTERS: Final = 128
"""On NVIDIA. Left alone, ptxas stops at 48 and spills 8 bytes."""
LINES: Final = 64
PARTIALS: Final = 8
"""Numbers in a line: those of `partials.py`, the squares, and one to make it 64 bytes."""

_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_BINS: tl.constexpr = tl.constexpr(BINS)
_PADDED_BINS: tl.constexpr = tl.constexpr(PADDED_BINS)
_PARTIALS: tl.constexpr = tl.constexpr(PARTIALS)
_USED: tl.constexpr = tl.constexpr(len(PARTIAL_COLUMNS) + 1)
_SUMS: tl.constexpr = tl.constexpr(len(SUM_COLUMNS))
_MAXIMA: tl.constexpr = tl.constexpr(len(MAX_COLUMNS))
_W_COUNT: tl.constexpr = tl.constexpr(SUM["w_count"])
_G_COUNT: tl.constexpr = tl.constexpr(SUM["g_count"])
_W_SQ: tl.constexpr = tl.constexpr(SUM["w_sq0"])
_G_SQ: tl.constexpr = tl.constexpr(SUM["g_sq0"])
_W_ABSMAX: tl.constexpr = tl.constexpr(MAX["w_absmax"])
_G_MAX: tl.constexpr = tl.constexpr(MAX["g_max"])


def chunk_registers(histogram: bool, value_dtype: torch.dtype) -> int:
    """Limit on NVIDIA. Left alone, ptxas stops at 168 with a histogram and spills 16 bytes."""
    return 200 if histogram or value_dtype == torch.float64 else 128


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5, 6], do_not_specialize=[7])
def exact_chunks_kernel(
    p_addresses,
    p_rows,
    p_numels,
    p_chunk_tensors,
    p_first_chunks,
    p_partials,
    p_counts,
    gradients,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(p_chunk_tensors + chunk).to(tl.int64)
    is_grad = tensor < gradients
    row = tl.load(p_rows + tensor).to(tl.int64)
    code, begin, head, blocks, aligned, step, edge = place_chunk(
        p_addresses, p_numels, p_first_chunks, chunk, tensor, row, is_grad, CHUNK, BLOCK
    )

    o_lane = tl.arange(0, BLOCK)
    b_sum = tl.zeros((BLOCK,), tl.float64)
    b_sq = tl.zeros((BLOCK,), tl.float64)
    b_flags = tl.zeros((BLOCK,), tl.int32)
    b_high = tl.full((BLOCK,), float("-inf"), VALUE)
    b_low = tl.full((BLOCK,), float("-inf"), VALUE)
    b_bins = tl.zeros((_PADDED_BINS,), tl.int32)
    m_all = tl.full((BLOCK,), 1, tl.int1)

    for _ in range(blocks):
        # Without a mask and with a known alignment these become 128-bit loads.
        b_x = load_values(aligned, code, o_lane, None, DTYPES, VALUE)
        aligned += step
        b_sum, b_flags, b_high, b_low, b_x, b_wide, m_x = add_block(
            b_x, m_all, b_sum, b_flags, b_high, b_low
        )
        b_sq += b_wide * b_wide
        if HISTOGRAM:
            if is_grad:
                b_bins += tl.histogram(signed_bin(b_x), _PADDED_BINS, mask=m_x)
    for first in range(0, edge, BLOCK):
        o_edge = first + o_lane
        b_x = load_edge(begin, code, o_edge, head, blocks, edge, DTYPES, VALUE, BLOCK)
        b_sum, b_flags, b_high, b_low, b_x, b_wide, m_x = add_block(
            b_x, o_edge < edge, b_sum, b_flags, b_high, b_low
        )
        b_sq += b_wide * b_wide
        if HISTOGRAM:
            if is_grad:
                b_bins += tl.histogram(signed_bin(b_x), _PADDED_BINS, mask=m_x)

    p_line = p_partials + chunk * _PARTIALS
    store_partials(p_line, b_sum, b_flags, b_high, b_low)
    tl.store(p_line + P_SQUARES, tl.sum(b_sq, 0))
    if HISTOGRAM:
        if is_grad:
            # Those beyond _BINS have counted nothing.
            p_count = p_counts + tensor * _BINS + tl.arange(0, _PADDED_BINS)
            tl.atomic_add(p_count, b_bins.to(tl.int64), mask=b_bins > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], do_not_specialize=[10])
def exact_rows_kernel(
    p_addresses,
    p_rows,
    p_numels,
    p_first_chunks,
    p_partials,
    p_counts,
    p_applied,
    p_sums,
    p_maxima,
    p_bins,
    gradients,
    WORDS: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    LINES: tl.constexpr,
):
    tensor = tl.program_id(0).to(tl.int64)
    is_grad = tensor < gradients
    row = tl.load(p_rows + tensor).to(tl.int64)
    numel = tl.load(p_numels + tensor).to(tl.float64)
    first = tl.load(p_first_chunks + tensor)
    last = tl.load(p_first_chunks + tensor + 1)
    b_sum, b_top = combine_partials(p_partials, first, last, _PARTIALS, _USED, LINES)

    factor = tl.full((), 1.0, tl.float64)
    if is_grad:
        has_grad = tl.load(p_addresses + row * A_COLUMNS + A_GRAD) != 0
        factor = tl.where(has_grad, tl.load(p_applied + row), 0.0)
    b_sum = times(factor, b_sum)
    b_top = tl.where(factor > 0, b_top, float("-inf"))

    o_part = tl.arange(0, _PARTIALS)
    o_group = tl.arange(0, _GROUPS)
    p_count = p_sums + row * _SUMS + tl.where(is_grad, _G_COUNT, _W_COUNT)
    p_square = p_sums + row * _SUMS + tl.where(is_grad, _G_SQ, _W_SQ)
    p_max = p_maxima + row * _MAXIMA
    tl.store(p_count, numel * factor)
    # Zeros, the last of the counts, have a column for gradients only.
    tl.store(p_count + 1 + o_part, b_sum, mask=o_part < tl.where(is_grad, P_HIGH, P_HIGH - 1))
    # The whole sum is known: all of it is in the first group.
    tl.store(p_square + o_part - P_SQUARES, b_sum, mask=o_part == P_SQUARES)
    tl.store(p_square + o_group, tl.zeros((_GROUPS,), tl.float64), mask=o_group > 0)
    m_extreme = (o_part >= P_HIGH) & (o_part < P_SQUARES)
    if is_grad:
        tl.store(p_max + _G_MAX + o_part - P_HIGH, b_top.to(tl.float32), mask=m_extreme)
    else:
        w_absmax = tl.max(tl.where(m_extreme, b_top, float("-inf")), 0)
        tl.store(p_max + _W_ABSMAX, w_absmax.to(tl.float32))
    if WORDS:
        if is_grad:
            o_word = padded_words(WORDS)
            m_word = o_word < WORDS
            b_words = tl.zeros_like(o_word).to(tl.int64)
            for place in tl.static_range(_BINS // WORDS):
                p_counted = p_counts + tensor * _BINS + place * WORDS + o_word
                b_words += tl.load(p_counted, mask=m_word, other=0) << (place * COUNT_BITS)
                # Ready for the next observation, so that nothing else has to clear them.
                tl.store(p_counted, tl.zeros_like(b_words), mask=m_word)
            tl.store(p_bins + row * WORDS + o_word, b_words.to(tl.float64) * factor, mask=m_word)


@dataclass(frozen=True)
class ExactTables:
    """Chunks of all tensors that are read in full, and the scratch that their partials go to.

    Gradients come first, then weights.
    """

    rows: torch.Tensor
    """int32 [tensors]: row of each tensor in the address table and the outputs."""
    numels: torch.Tensor
    """int64 [tensors]: elements held here."""
    chunk_tensors: torch.Tensor
    """int32 [chunks]"""
    first_chunks: torch.Tensor
    """int64 [tensors + 1]"""
    partials: torch.Tensor
    """float64 [chunks, PARTIALS]"""
    counts: torch.Tensor
    """int64 [gradients, BINS], zero between launches; [0, BINS] for no histogram."""
    gradients: int
    """How many of the tensors are gradients."""

    def __post_init__(self) -> None:
        n, chunks, device = len(self.rows), len(self.chunk_tensors), self.rows.device
        check("rows", self.rows, torch.int32, (n,), device)
        check("numels", self.numels, torch.int64, (n,), device)
        check("chunk_tensors", self.chunk_tensors, torch.int32, (chunks,), device)
        check("first_chunks", self.first_chunks, torch.int64, (n + 1,), device)
        check("partials", self.partials, torch.float64, (chunks, PARTIALS), device)
        counted = self.gradients if len(self.counts) else 0
        check("counts", self.counts, torch.int64, (counted, BINS), device)

    @classmethod
    def build(
        cls,
        weights: Mapping[int, int],
        gradients: Mapping[int, int],
        device: torch.device,
        histogram: bool,
    ) -> ExactTables:
        """Cut weights and gradients, given as local elements by row, into chunks.

        With `histogram` the bins of these gradients are over every element too.
        """
        numels = [*gradients.values(), *weights.values()]
        chunk_tensors, first_chunks = cut_into_chunks(numels, CHUNK, device)
        return cls(
            rows=upload(torch.tensor([*gradients, *weights], dtype=torch.int32), device),
            numels=upload(torch.tensor(numels, dtype=torch.int64), device),
            chunk_tensors=chunk_tensors,
            first_chunks=first_chunks,
            partials=torch.empty(
                (len(chunk_tensors), PARTIALS), dtype=torch.float64, device=device
            ),
            counts=torch.zeros(
                (len(gradients) if histogram else 0, BINS), dtype=torch.int64, device=device
            ),
            gradients=len(gradients),
        )


def fill_exact_columns(
    tables: ExactTables,
    addresses: torch.Tensor,
    applied: torch.Tensor,
    outputs: RowOutputs,
    dtypes: int,
    value_dtype: torch.dtype,
) -> None:
    """Overwrite the columns of the tensors in `tables` by those over every element.

    `addresses` is the address table of all rows; the tensors that are read must each be one dense
    piece of memory. `value_dtype` is float32, or float64 when a tensor is. Bins are overwritten
    only where `tables` were built with a histogram. Allocates nothing and does not wait.
    """
    verify_launch(addresses, applied, outputs, value_dtype, tables.rows.device)
    if not len(tables.rows):
        return
    histogram = outputs.bins is not None and len(tables.counts) > 0
    if len(tables.chunk_tensors):
        exact_chunks_kernel[(len(tables.chunk_tensors),)](
            addresses,
            tables.rows,
            tables.numels,
            tables.chunk_tensors,
            tables.first_chunks,
            tables.partials,
            tables.counts,
            tables.gradients,
            DTYPES=dtypes,
            VALUE=VALUE_TYPES[value_dtype],
            HISTOGRAM=histogram,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **register_limit(chunk_registers(histogram, value_dtype)),
        )
    exact_rows_kernel[(len(tables.rows),)](
        addresses,
        tables.rows,
        tables.numels,
        tables.first_chunks,
        tables.partials,
        tables.counts,
        applied,
        outputs.sums,
        outputs.maxima,
        outputs.sums if outputs.bins is None else outputs.bins,
        tables.gradients,
        **count_constants(outputs.words if histogram else 0),
        LINES=LINES,
        num_warps=WARPS,
        **register_limit(ROW_REGISTERS),
    )

"""Gradient columns over sampled runs of up to RUN elements: one launch over chunks of all runs.

A program adds up CHUNK_RUNS runs of one gradient as [BLOCK_RUNS, RUN] tiles into a line of
partials; a second tiny launch adds a gradient's partials in a fixed order. Sums are fp64 in both.

A tile has as many lanes as there are groups, which makes sums by group cheap. A run whose elements
belong to one group adds its sum to the lane of that group. A run by lane is read so far to the
right that each element is in the lane of its own group.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from csrc_triton.dtypes import load_values
from csrc_triton.finite import add_block, times
from csrc_triton.partials import (
    P_HIGH,
    P_SQUARES,
    PARTIAL_COLUMNS,
    combine_partials,
    store_partials,
)
from csrc_triton.row_layout import BY_LANE, GROUPS, MAX, MAX_COLUMNS, RUN, SUM, SUM_COLUMNS
from csrc_triton.tables import (
    A_COLUMNS,
    A_GRAD,
    A_GRAD_CODE,
    OFFSET_TYPES,
    VALUE_TYPES,
    RowOutputs,
    check,
    cut_into_chunks,
    register_limit,
    verify_launch,
)

CHUNK_RUNS: Final = 512
"""Runs of one program: an ordinary matrix is one chunk, a tall one gives work to every SM."""
BLOCK_RUNS: Final = 64
"""Four elements per thread."""
WARPS: Final = 4
CHUNK_REGISTERS: Final[dict[torch.dtype, int]] = {torch.float32: 96, torch.float64: 128}
"""On NVIDIA, by the dtype that elements are widened to: with 96 those in fp64 spill 8 bytes."""
ROW_REGISTERS: Final = 72
"""On NVIDIA."""
LINES: Final = 32
PARTIALS: Final = 16
"""Numbers in a line: those of `partials.py`, squares by group, and two to make it 128 bytes."""

_RUN: tl.constexpr = tl.constexpr(RUN)
_BY_LANE: tl.constexpr = tl.constexpr(BY_LANE)
_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_PARTIALS: tl.constexpr = tl.constexpr(PARTIALS)
_USED: tl.constexpr = tl.constexpr(len(PARTIAL_COLUMNS) + GROUPS)
_SUMS: tl.constexpr = tl.constexpr(len(SUM_COLUMNS))
_MAXIMA: tl.constexpr = tl.constexpr(len(MAX_COLUMNS))
_G_COUNT: tl.constexpr = tl.constexpr(SUM["g_count"])
_G_SQ: tl.constexpr = tl.constexpr(SUM["g_sq0"])
_G_MAX: tl.constexpr = tl.constexpr(MAX["g_max"])
assert RUN == GROUPS, "a lane of a tile is a place within a run and a group"


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5, 6, 7])
def run_chunks_kernel(
    p_addresses,
    p_rows,
    p_first_runs,
    p_chunk_tensors,
    p_first_chunks,
    p_offsets,
    p_codes,
    p_partials,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK_RUNS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(p_chunk_tensors + chunk).to(tl.int64)
    row = tl.load(p_rows + tensor).to(tl.int64)
    first_run = tl.load(p_first_runs + tensor)
    first_run += (chunk - tl.load(p_first_chunks + tensor)) * CHUNK_RUNS
    runs = tl.minimum(tl.load(p_first_runs + tensor + 1) - first_run, CHUNK_RUNS).to(tl.int32)
    address = tl.load(p_addresses + row * A_COLUMNS + A_GRAD)
    code = tl.load(p_addresses + row * A_COLUMNS + A_GRAD_CODE)
    runs = tl.where(address == 0, 0, runs)
    p_offsets += first_run
    p_codes += first_run

    o_lane = tl.arange(0, _RUN)[None, :]
    b_sum = tl.zeros((BLOCK_RUNS, _RUN), tl.float64)
    b_sq = tl.zeros((BLOCK_RUNS, _RUN), tl.float64)
    b_flags = tl.zeros((BLOCK_RUNS, _RUN), tl.int32)
    b_high = tl.full((BLOCK_RUNS, _RUN), float("-inf"), VALUE)
    b_low = tl.full((BLOCK_RUNS, _RUN), float("-inf"), VALUE)
    for first in range(0, runs, BLOCK_RUNS):
        o_run = (first + tl.arange(0, BLOCK_RUNS))[:, None]
        m_run = o_run < runs
        o_first = tl.load(p_offsets + o_run, mask=m_run, other=0)
        b_code = tl.load(p_codes + o_run, mask=m_run, other=0).to(tl.int32)
        b_length = (b_code & (_RUN - 1)) + 1
        b_group = b_code >> 3
        m_by_lane = b_group >= _BY_LANE
        o_place = o_lane - tl.where(m_by_lane, b_group - _BY_LANE, 0)
        m_read = m_run & (o_place >= 0) & (o_place < b_length)
        b_x = load_values(address, code, o_first + o_place, m_read, DTYPES, VALUE)
        b_sum, b_flags, b_high, b_low, _, b_wide, _ = add_block(
            b_x, m_read, b_sum, b_flags, b_high, b_low
        )
        b_square = b_wide * b_wide
        b_of_run = tl.sum(b_square, 1)[:, None]
        b_sq += tl.where(m_by_lane, b_square, tl.where(o_lane == b_group, b_of_run, 0.0))

    p_line = p_partials + chunk * _PARTIALS
    store_partials(p_line, b_sum, b_flags, b_high, b_low)
    tl.store(p_line + P_SQUARES + tl.arange(0, _GROUPS), tl.sum(b_sq, 0))


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4, 5, 6, 7])
def run_rows_kernel(
    p_addresses,
    p_rows,
    p_elements,
    p_first_chunks,
    p_partials,
    p_applied,
    p_sums,
    p_maxima,
    LINES: tl.constexpr,
):
    tensor = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + tensor).to(tl.int64)
    first = tl.load(p_first_chunks + tensor)
    last = tl.load(p_first_chunks + tensor + 1)
    b_sum, b_top = combine_partials(p_partials, first, last, _PARTIALS, _USED, LINES)
    has_grad = tl.load(p_addresses + row * A_COLUMNS + A_GRAD) != 0
    graded = tl.where(has_grad, tl.load(p_applied + row), 0.0)
    b_sum = times(graded, b_sum)
    b_top = tl.where(graded > 0, b_top, float("-inf")).to(tl.float32)

    o_part = tl.arange(0, _PARTIALS)
    p_sum = p_sums + row * _SUMS
    tl.store(p_sum + _G_COUNT, tl.load(p_elements + tensor).to(tl.float64) * graded)
    tl.store(p_sum + _G_COUNT + 1 + o_part, b_sum, mask=o_part < P_HIGH)
    m_square = (o_part >= P_SQUARES) & (o_part < _USED)
    tl.store(p_sum + _G_SQ + o_part - P_SQUARES, b_sum, mask=m_square)
    m_extreme = (o_part >= P_HIGH) & (o_part < P_SQUARES)
    tl.store(p_maxima + row * _MAXIMA + _G_MAX + o_part - P_HIGH, b_top, mask=m_extreme)


@dataclass(frozen=True)
class RunTables:
    """Chunks of the runs of all sampled gradients, and the scratch that their partials go to."""

    rows: torch.Tensor
    """int32 [tensors]: row of each gradient in the address table and the outputs."""
    elements: torch.Tensor
    """int64 [tensors]: elements in the runs of each gradient."""
    first_runs: torch.Tensor
    """int64 [tensors + 1]"""
    chunk_tensors: torch.Tensor
    """int32 [chunks]"""
    first_chunks: torch.Tensor
    """int64 [tensors + 1]"""
    offsets: torch.Tensor
    """int32 or int64 [runs]: offset of the first element from the gradient's first, in memory."""
    codes: torch.Tensor
    """uint8 [runs]: length - 1 in the low 3 bits, then the group of the run (0 to 7) or, with
    BY_LANE added, that of its first element."""
    partials: torch.Tensor
    """float64 [chunks, PARTIALS]"""

    def __post_init__(self) -> None:
        n, chunks, device = len(self.rows), len(self.chunk_tensors), self.rows.device
        check("rows", self.rows, torch.int32, (n,), device)
        check("elements", self.elements, torch.int64, (n,), device)
        check("first_runs", self.first_runs, torch.int64, (n + 1,), device)
        check("chunk_tensors", self.chunk_tensors, torch.int32, (chunks,), device)
        check("first_chunks", self.first_chunks, torch.int64, (n + 1,), device)
        if self.offsets.dtype not in OFFSET_TYPES:
            raise TypeError(f"offsets must be int32 or int64, not {self.offsets.dtype}")
        runs = len(self.codes)
        check("offsets", self.offsets, self.offsets.dtype, (runs,), device)
        check("codes", self.codes, torch.uint8, (runs,), device)
        check("partials", self.partials, torch.float64, (chunks, PARTIALS), device)

    @classmethod
    def build(
        cls, first: NDArray[np.int64], offsets: torch.Tensor, codes: torch.Tensor
    ) -> RunTables:
        """Cut runs into chunks; those of row i are first[i] to first[i + 1]. Waits for `codes`."""
        device = offsets.device
        runs = np.diff(first)
        rows = np.flatnonzero(runs)
        chunk_tensors, first_chunks = cut_into_chunks(runs[rows].tolist(), CHUNK_RUNS, device)
        ends = np.concatenate(([0], np.cumsum((codes.cpu().numpy() & (RUN - 1)) + np.int64(1))))
        return cls(
            rows=torch.from_numpy(rows.astype(np.int32)).to(device),
            elements=torch.from_numpy(np.diff(ends[first])[rows].astype(np.int64)).to(device),
            first_runs=torch.from_numpy(first[np.append(rows, len(runs))].copy()).to(device),
            chunk_tensors=chunk_tensors,
            first_chunks=first_chunks,
            offsets=offsets,
            codes=codes,
            partials=torch.empty(
                (len(chunk_tensors), PARTIALS), dtype=torch.float64, device=device
            ),
        )


def fill_run_columns(
    tables: RunTables,
    addresses: torch.Tensor,
    applied: torch.Tensor,
    outputs: RowOutputs,
    dtypes: int,
    value_dtype: torch.dtype,
) -> None:
    """Overwrite the gradient columns of the rows in `tables`, not the bins.

    `addresses` is the address table of all rows, `applied` as in `fill_sampled_rows`, `value_dtype`
    float32, or float64 when a tensor is. Allocates nothing and does not wait.
    """
    verify_launch(addresses, applied, outputs, value_dtype, tables.rows.device)
    if not len(tables.rows):
        return
    run_chunks_kernel[(len(tables.chunk_tensors),)](
        addresses,
        tables.rows,
        tables.first_runs,
        tables.chunk_tensors,
        tables.first_chunks,
        tables.offsets,
        tables.codes,
        tables.partials,
        DTYPES=dtypes,
        VALUE=VALUE_TYPES[value_dtype],
        CHUNK_RUNS=CHUNK_RUNS,
        BLOCK_RUNS=BLOCK_RUNS,
        num_warps=WARPS,
        **register_limit(CHUNK_REGISTERS[value_dtype]),
    )
    run_rows_kernel[(len(tables.rows),)](
        addresses,
        tables.rows,
        tables.elements,
        tables.first_chunks,
        tables.partials,
        applied,
        outputs.sums,
        outputs.maxima,
        LINES=LINES,
        num_warps=WARPS,
        **register_limit(ROW_REGISTERS),
    )

"""Statistics of one activation in one launch, added to its row.

An activation is [outer, units, inner]: positions are (outer, inner), each with a value for every
unit. A program reads a stripe of UNITS units at POSITIONS positions a time, so the largest
magnitude of a unit stays in registers until the end, and is written by one atomic. Sums are fp64.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from csrc_triton.tables import register_limit

POSITIONS: Final = 16
UNITS: Final = 64
PASSES: Final = 32
"""Blocks of positions of one program."""
WARPS: Final = 4
REGISTERS: Final = 96
"""On NVIDIA. Left alone, ptxas stops at 72 on sm_100 and spills 8 bytes."""
SUM_COLUMNS: Final = ("count", "total", "squares", "zeros", "saturated")
"""What is added to the first columns of the row of sums."""


# One variant for each dtype, whatever the shape: none compiles in the middle of training.
@triton.jit(
    do_not_specialize=[4, 5, 6, 7, 8, 9, 10, 11], do_not_specialize_on_alignment=[0, 1, 2, 3]
)
def activation_stats_kernel(
    p_values,
    p_sums,
    p_absmax,
    p_slots,
    positions,
    units,
    inner,
    stride_outer,
    stride_unit,
    stride_inner,
    first,
    all_units,
    low,
    high,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
    POSITIONS: tl.constexpr,
    UNITS: tl.constexpr,
    PASSES: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * (POSITIONS * PASSES)
    o_unit = tl.program_id(1).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    m_unit = o_unit < units
    b_total = tl.zeros((UNITS,), tl.float64)
    b_squares = tl.zeros((UNITS,), tl.float64)
    b_counts = tl.zeros((UNITS,), tl.int32)
    b_zeros = tl.zeros((UNITS,), tl.int32)
    b_saturated = tl.zeros((UNITS,), tl.int32)
    b_top = tl.full((UNITS,), float("-inf"), tl.float32)
    for one in range(PASSES):
        o_position = begin + one * POSITIONS + tl.arange(0, POSITIONS)
        m_read = (o_position < positions)[:, None] & m_unit[None, :]
        o_value = (o_position // inner) * stride_outer + (o_position % inner) * stride_inner
        p_read = p_values + o_value[:, None] + (o_unit * stride_unit)[None, :]
        b_x = tl.load(p_read, mask=m_read, other=0.0).to(WIDE)
        b_wide = b_x.to(tl.float64)
        b_total += tl.sum(b_wide, 0)
        b_squares += tl.sum(b_wide * b_wide, 0)
        b_counts += tl.sum(m_read.to(tl.int32), 0)
        b_zeros += tl.sum(((b_x == 0) & m_read).to(tl.int32), 0)
        m_saturated = ((b_x <= low) | (b_x >= high)) & m_read
        b_saturated += tl.sum(m_saturated.to(tl.int32), 0)
        # A NaN is larger than everything: a maximum would drop it.
        b_size = tl.where(b_x == b_x, tl.abs(b_x), float("inf")).to(tl.float32)
        b_top = tl.maximum(b_top, tl.max(tl.where(m_read, b_size, float("-inf")), 0))
    tl.atomic_add(p_sums, tl.sum(b_counts, 0).to(tl.float64), sem="relaxed")
    tl.atomic_add(p_sums + 1, tl.sum(b_total, 0), sem="relaxed")
    tl.atomic_add(p_sums + 2, tl.sum(b_squares, 0), sem="relaxed")
    tl.atomic_add(p_sums + 3, tl.sum(b_zeros, 0).to(tl.float64), sem="relaxed")
    tl.atomic_add(p_sums + 4, tl.sum(b_saturated, 0).to(tl.float64), sem="relaxed")
    tl.atomic_max(p_absmax, tl.max(b_top, 0), sem="relaxed")
    # Slot s is of unit s * all_units // slots; the other units have none.
    slots = tl.minimum(all_units, SLOTS)
    o_slot = ((first + o_unit) * slots + all_units - 1) // all_units
    m_slot = m_unit & (o_slot < slots) & (o_slot * all_units // slots == first + o_unit)
    tl.atomic_max(p_slots + o_slot, b_top, mask=m_slot, sem="relaxed")


def add_activation_stats(
    values: torch.Tensor,
    sums: torch.Tensor,
    absmax: torch.Tensor,
    slots: torch.Tensor,
    placement: tuple[int, int],
    bounds: tuple[float, float],
) -> None:
    """Add the statistics of `values` [outer, units, inner] to a row. Allocates nothing.

    `sums` float64 has SUM_COLUMNS first; `absmax` float32 [1] and `slots` float32 get the largest
    magnitude of all elements and of evenly spaced units; a NaN counts as infinite. `placement`
    says where the first unit is among how many on all ranks; `bounds` from where on, down and up,
    a value is saturated.
    """
    outer, units, inner = values.shape
    positions = outer * inner
    if not positions or not units:
        return
    grid = (triton.cdiv(positions, POSITIONS * PASSES), triton.cdiv(units, UNITS))
    activation_stats_kernel[grid](
        values,
        sums,
        absmax,
        slots,
        positions,
        units,
        inner,
        *values.stride(),
        *placement,
        *bounds,
        SLOTS=len(slots),
        WIDE=tl.float64 if values.dtype == torch.float64 else tl.float32,
        POSITIONS=POSITIONS,
        UNITS=UNITS,
        PASSES=PASSES,
        num_warps=WARPS,
        **register_limit(REGISTERS),
    )

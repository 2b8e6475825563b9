"""Copy the sampled weights just before the step, in one launch for all parameters."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from csrc_triton.dtypes import load_values
from csrc_triton.row_layout import GROUPS
from csrc_triton.tables import (
    A_COLUMNS,
    A_WEIGHT,
    A_WEIGHT_CODE,
    A_WEIGHT_OFFSETS,
    OFFSET_TYPES,
    SAMPLED_WARPS,
    VALUE_TYPES,
    RowTables,
    block_width,
)

_GROUPS: tl.constexpr = tl.constexpr(GROUPS)


# One binary per configuration: the compile tests measure the binary that runs, and a table at an
# unaligned address does not recompile.
@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4])
def snapshot_kernel(
    p_addresses,
    p_starts,
    p_widths,
    p_group_counts,
    p_snapshot,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_addresses + row * A_COLUMNS
    weight = tl.load(p_row + A_WEIGHT)
    code = tl.load(p_row + A_WEIGHT_CODE)
    p_offsets = tl.load(p_row + A_WEIGHT_OFFSETS).to(tl.pointer_type(OFFSET))
    p_kept = p_snapshot + tl.load(p_starts + row)
    width = tl.load(p_widths + row)
    o_group = tl.arange(0, _GROUPS)
    b_counts = tl.load(p_group_counts + row * _GROUPS + o_group)
    for first in range(0, width, BLOCK_W):
        o_column = first + tl.arange(0, BLOCK_W)
        o_slot = o_group[:, None] * width + o_column[None, :]
        m_used = o_column[None, :] < b_counts[:, None]
        o_element = tl.load(p_offsets + o_slot, mask=m_used, other=0)
        b_weight = load_values(weight, code, o_element, m_used, DTYPES, VALUE)
        # Padding slots are written too, as zeros, which do not change sums.
        tl.store(p_kept + o_slot, b_weight, mask=(o_column < width)[None, :])


def take_snapshot(tables: RowTables, dtypes: int) -> None:
    """Write the sampled weights into `tables.snapshot`.

    `dtypes` is the `dtype_set` of all weights. Allocates nothing and does not synchronize.
    """
    if not len(tables):
        return
    snapshot_kernel[(len(tables),)](
        tables.addresses,
        tables.starts,
        tables.widths,
        tables.group_counts,
        tables.snapshot,
        DTYPES=dtypes,
        VALUE=VALUE_TYPES[tables.snapshot.dtype],
        OFFSET=OFFSET_TYPES[tables.offset_dtype],
        BLOCK_W=block_width(tables.widest),
        num_warps=SAMPLED_WARPS,
    )

"""Count NaN and Inf in every weight and gradient: one launch over chunks of them all."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from csrc_triton.chunk_places import load_edge, place_chunk
from csrc_triton.dtypes import load_values
from csrc_triton.finite import is_finite
from csrc_triton.tables import (
    VALUE_TYPES,
    cut_into_chunks,
    upload,
    verify_addresses,
)

CHUNK: Final = 1 << 16
"""Elements of one program."""
BLOCK: Final = 1024
WARPS: Final = 4
COUNTED: Final = ("w_nan", "w_inf", "g_nan", "g_inf")
"""Columns of the counts."""

_COLUMNS: tl.constexpr = tl.constexpr(len(COUNTED))


@triton.jit(do_not_specialize_on_alignment=[0, 1, 2, 3, 4], do_not_specialize=[5])
def nonfinite_counts_kernel(
    p_addresses,
    p_numels,
    p_chunk_tensors,
    p_first_chunks,
    p_counts,
    parameters,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(p_chunk_tensors + chunk).to(tl.int64)
    is_grad = tensor >= parameters
    row = tl.where(is_grad, tensor - parameters, tensor)
    code, begin, head, blocks, aligned, step, edge = place_chunk(
        p_addresses, p_numels, p_first_chunks, chunk, tensor, row, is_grad, CHUNK, BLOCK
    )

    o_lane = tl.arange(0, BLOCK)
    b_nan = tl.zeros((BLOCK,), tl.int32)
    b_nonfinite = tl.zeros((BLOCK,), tl.int32)
    for _ in range(blocks):
        # Without a mask and with a known alignment these become 128-bit loads.
        b_x = load_values(aligned, code, o_lane, None, DTYPES, VALUE)
        aligned += step
        b_nan += (b_x != b_x).to(tl.int32)
        b_nonfinite += (~is_finite(b_x)).to(tl.int32)
    for first in range(0, edge, BLOCK):
        b_x = load_edge(begin, code, first + o_lane, head, blocks, edge, DTYPES, VALUE, BLOCK)
        b_nan += (b_x != b_x).to(tl.int32)
        b_nonfinite += (~is_finite(b_x)).to(tl.int32)

    nan = tl.sum(b_nan, 0)
    inf = tl.sum(b_nonfinite, 0) - nan
    # Almost all chunks have neither, and write nothing.
    p_count = p_counts + row * _COLUMNS + tl.where(is_grad, 2, 0)
    tl.atomic_add(p_count, nan.to(tl.int64), mask=nan > 0, sem="relaxed")
    tl.atomic_add(p_count + 1, inf.to(tl.int64), mask=inf > 0, sem="relaxed")


def count_nonfinite(
    addresses: torch.Tensor, numels: Sequence[int], dtypes: int, value_dtype: torch.dtype
) -> torch.Tensor:
    """Return the NaN and Inf in weight and gradient of every row: int64 [rows, COUNTED].

    `numels` are the local elements of each row; the tensors must each be one dense piece of memory.
    `value_dtype` is float32, or float64 when a tensor is. Does not wait.
    """
    rows, device = len(addresses), addresses.device
    verify_addresses(addresses, value_dtype, device)
    if len(numels) != rows:
        raise ValueError(f"{len(numels)} sizes for {rows} rows of the address table")
    counts = torch.zeros((rows, len(COUNTED)), dtype=torch.int64, device=device)
    both = [*numels, *numels]  # weights, then gradients
    chunk_tensors, first_chunks = cut_into_chunks(both, CHUNK, device)
    if len(chunk_tensors):
        nonfinite_counts_kernel[(len(chunk_tensors),)](
            addresses,
            upload(torch.tensor(both, dtype=torch.int64), device),
            chunk_tensors,
            first_chunks,
            counts,
            rows,
            DTYPES=dtypes,
            VALUE=VALUE_TYPES[value_dtype],
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return counts

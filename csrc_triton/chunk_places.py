"""Where a chunk of a tensor lies, and which of its elements are aligned to 16 bytes."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from csrc_triton.dtypes import load_values
from csrc_triton.tables import A_COLUMNS, A_GRAD, A_WEIGHT


@triton.jit
def place_chunk(
    p_addresses,
    p_numels,
    p_first_chunks,
    chunk,
    tensor,
    row,
    is_grad,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the dtype code of the tensor and the chunk's address; the elements before its first
    16-byte boundary, the whole blocks after them, their address, and the bytes of a block; and the
    elements that are in no whole block.

    There is nothing in it where there is no tensor. A gradient in a bucket starts anywhere.
    """
    start = (chunk - tl.load(p_first_chunks + tensor)) * CHUNK
    length = tl.minimum(tl.load(p_numels + tensor) - start, CHUNK).to(tl.int32)
    p_place = p_addresses + row * A_COLUMNS + tl.where(is_grad, A_GRAD, A_WEIGHT)
    address = tl.load(p_place)
    code = tl.load(p_place + 1)
    length = tl.where(address == 0, 0, length)
    # Bytes per element as a shift, by dtype code: fp32, bf16, fp16, fp64, e4m3, e5m2.
    shift = tl.where(code == 3, 3, tl.where(code == 0, 2, tl.where(code < 3, 1, 0)))
    begin = address + (start << shift)
    head = tl.minimum((((16 - (begin & 15)) & 15) >> shift).to(tl.int32), length)
    blocks = (length - head) // BLOCK
    aligned = begin + (head.to(tl.int64) << shift)
    step = tl.full((), BLOCK, tl.int64) << shift
    return code, begin, head, blocks, aligned, step, length - blocks * BLOCK


@triton.jit
def load_edge(
    begin,
    code,
    o_edge,
    head,
    blocks,
    edge,
    DTYPES: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load elements that are in no whole block, 0 beyond the last.

    Head and tail together: below `head` they lie at the beginning, the others after the blocks.
    """
    o_element = tl.where(o_edge < head, o_edge, o_edge + blocks * BLOCK)
    return load_values(begin, code, o_element, o_edge < edge, DTYPES, VALUE)

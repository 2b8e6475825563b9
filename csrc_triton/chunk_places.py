"""Where a chunk of a tensor lies, and which of its elements are aligned to 16 bytes."""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_chunk(address, code, start, length, BLOCK: tl.constexpr):
    """Return the chunk's address, its length, the elements before the first 16-byte boundary, the
    whole blocks after them, their address, and the bytes of a block.

    `length` is 0 where there is no tensor. A gradient in a bucket starts anywhere.
    """
    length = tl.where(address == 0, 0, length)
    # Bytes per element as a shift, by dtype code: fp32, bf16, fp16, fp64, e4m3, e5m2.
    shift = tl.where(code == 3, 3, tl.where(code == 0, 2, tl.where(code < 3, 1, 0)))
    begin = address + (start << shift)
    head = tl.minimum((((16 - (begin & 15)) & 15) >> shift).to(tl.int32), length)
    blocks = (length - head) // BLOCK
    aligned = begin + (head.to(tl.int64) << shift)
    step = tl.full((), BLOCK, tl.int64) << shift
    return begin, length, head, blocks, aligned, step

"""Loads that depend on the dtype code of a row in the address table.

One launch reads parameters of different dtypes. A pointer may not have two types in two branches
(the interpreter accepts that, the compiler does not), so every branch loads and converts, and
the branches merge values.
"""

# Triton gives kernel functions types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A constant and a value on the device cannot be joined by `and`: the outer `if` is static.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from csrc_triton.address_layout import DTYPE_CODES

_CODES: tl.constexpr = tl.constexpr(len(DTYPE_CODES))


@triton.jit
def read(address, o_element, m_read, TYPE: tl.constexpr):
    """Load with a mask, or without a mask and 16-byte aligned.

    Only the latter becomes 128-bit loads: the compiler cannot assume that neighbors have the same
    mask. The alignment hint must be where the pointer is made; on a function argument it is lost.
    """
    if m_read is None:
        p_first = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
        return tl.load(p_first + o_element)
    else:
        return tl.load(address.to(tl.pointer_type(TYPE)) + o_element, mask=m_read, other=0)


@triton.jit
def load_one_dtype(address, o_element, m_read, CODE: tl.constexpr, VALUE: tl.constexpr):
    """Load elements of one statically known dtype as VALUE, 0 where masked."""
    if CODE == 0:
        b_raw = read(address, o_element, m_read, tl.float32)
        b_value = b_raw.to(VALUE)
    elif CODE == 1:
        # bf16 is the upper half of fp32. Converted by bits, because the interpreter's conversion
        # flushes subnormals, unlike the hardware.
        b_upper = read(address, o_element, m_read, tl.uint16)
        b_value = (b_upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(VALUE)
    elif CODE == 2:
        b_raw = read(address, o_element, m_read, tl.float16)
        b_value = b_raw.to(tl.float32).to(VALUE)
    elif CODE == 3:
        b_raw = read(address, o_element, m_read, tl.float64)
        b_value = b_raw.to(VALUE)
    else:
        # fp8 is decoded by bits: sm_80 has no fp8e4nv, and the conversion through fp16 is exact on
        # every target, including subnormals.
        b_byte = read(address, o_element, m_read, tl.uint8)
        b_bits = b_byte.to(tl.uint16)
        if CODE == 4:
            b_half = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)
            b_scaled = b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            b_value = tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b_scaled).to(VALUE)
        else:
            b_half = (b_bits << 8).to(tl.uint16)
            b_value = b_half.to(tl.float16, bitcast=True).to(tl.float32).to(VALUE)
    return b_value


@triton.jit
def load_values(address, code, o_element, m_read, DTYPES: tl.constexpr, VALUE: tl.constexpr):
    """Load elements at flat offsets of the tensor at `address` as VALUE, 0 where masked.

    With one dtype in DTYPES there is no branch, so a pure bf16 or fp32 model pays for none.
    """
    b_value = tl.zeros(o_element.shape, VALUE)
    for CODE in tl.static_range(_CODES):
        if DTYPES == (1 << CODE):
            b_value = load_one_dtype(address, o_element, m_read, CODE, VALUE)
        elif (DTYPES >> CODE) & 1:
            if code == CODE:
                b_value = load_one_dtype(address, o_element, m_read, CODE, VALUE)
    return b_value

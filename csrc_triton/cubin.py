"""Read registers and stack of a compiled NVIDIA kernel from its ELF file.

`cuobjdump --dump-resource-usage` prints the same, in a process that takes longer than compiling.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

_REGISTERS: Final = 0x2F
_FRAME: Final = 0x11
"""Attributes of a function in the section `.nv.info`: number of its symbol, and the value."""
_SIZED: Final = 4
"""Format of an attribute that has a size; the others have their value in place of the size."""


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread and the bytes of stack and local memory."""
    registers = stack = 0
    for name, content in _sections(cubin):
        if name.startswith(".nv.local."):
            stack += len(content)
        elif name == ".nv.info":
            for attribute, value in _attributes(content):
                if attribute == _REGISTERS:
                    registers = max(registers, value)
                elif attribute == _FRAME:
                    stack += value
    if not registers:
        raise ValueError("the file does not state the registers of a kernel")
    return registers, stack


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    begin, length = heads[of_names][4:]
    names = cubin[begin : begin + length]
    for place, _, _, _, begin, length in heads:
        name = names[place : names.index(b"\0", place)].decode()
        yield name, cubin[begin : begin + length]


def _attributes(content: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(content):
        kind, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if kind == _SIZED:
            if size == 8:
                yield attribute, struct.unpack_from("<I", content, at + 4)[0]
            at += size

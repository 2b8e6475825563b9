"""Registers and stack from the ELF file of a kernel. `test_compile` compares with NVIDIA's tool."""

from __future__ import annotations

import struct

import pytest

from csrc_triton.cubin import registers_and_stack


def _elf(sections: dict[str, bytes]) -> bytes:
    """An ELF file with these sections and one of their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body, heads = b"", []
    for name, content in {**sections, ".shstrtab": names}.items():
        place = names.index(b"\0" + name.encode() + b"\0") + 1
        heads.append(
            struct.pack("<IIQQQQIIQQ", place, 0, 0, 0, 64 + len(body), len(content), *[0] * 4)
        )
        body += content
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", head, 0x28, 64 + len(body))
    struct.pack_into("<HHH", head, 0x3A, 64, len(heads), len(heads) - 1)
    return bytes(head) + body + b"".join(heads)


def _attribute(number: int, value: int) -> bytes:
    return struct.pack("<BBHII", 4, number, 8, 10, value)


def test_registers_and_stack_are_found_among_other_attributes() -> None:
    other = struct.pack("<BBH", 3, 0x50, 7) + struct.pack("<BBHI", 4, 0x37, 4, 99)
    info = other + _attribute(0x2F, 24) + _attribute(0x11, 592) + _attribute(0x12, 600) + other
    sections = {".text.kernel": b"code", ".nv.info": info, ".nv.info.kernel": other}
    assert registers_and_stack(_elf(sections)) == (24, 592)
    assert registers_and_stack(_elf({**sections, ".nv.local.kernel": bytes(16)})) == (24, 608)


def test_a_file_without_registers_is_refused() -> None:
    with pytest.raises(ValueError, match="does not state the registers"):
        registers_and_stack(_elf({".nv.info": _attribute(0x11, 0)}))
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        registers_and_stack(b"text")

"""Break bytes, JSON values and whole files in ways that were seen, and in random ones."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ODD_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1e308, -0.0, 2**63, -(2**63) - 1, 10**400, 1e-320),
    *(
        "",
        "nan",
        "text",
        "\x1b[2J\x1b[31mred",
        "[/nope]",
        "[bold",
        "\ud800",
        "a\x00b",
        "\u202eevil",
    ),
    *("x" * 5000, "</script><script>alert(1)</script>", "{0.__class__}", "%s%n", "${HOME}"),
    *([], {}, [[]], {"": {}}, [None], [1, "a"], {"a": [1, {"b": None}]}, [10**400] * 3),
)
ODD_TEXTS: Final[tuple[bytes, ...]] = (
    *(b"", b"\x00" * 100, b"\xff" * 64, b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"null", b"NaN"),
    *(b"[" * 20_000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"9" * 401, b"9" * 6000, b"1e999"),
    *(b'"' + b"\\ud800" * 20 + b'"', b"a: &a [*a, *a]", b"{" * 3000, b"- " * 3000, b"? " * 500),
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in range(97, 107)
    ),
    b"a: &a {k: v}\n"
    + b"".join(
        b"%c: &%c {<<: [%s]}\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9))
        for c in range(97, 107)
    ),
    *(
        b"2001-99-99",
        b"!!python/object/apply:os.system ['true']",
        b"!!binary =",
        b"0x" + b"f" * 9000,
    ),
    *(
        b"1:" * 400 + b"1",
        b"[1, 2",
        b"\x1b]0;title\x07",
        b"\t- a",
        b"%YAML 9.9\n---\na",
        b"!!float x",
    ),
)


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a few changes: bits, cuts, insertions, repetitions, lengths."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(9)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = draw.randrange(256)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + draw.choice((1, 4, 8, 100, 4000))]
        elif kind == 4:
            data[at:at] = draw.choice(ODD_TEXTS)
        elif kind == 5:
            data[at:at] = draw.randbytes(draw.choice((1, 8, 200)))
        elif kind == 6:
            start = draw.randrange(len(data) + 1)
            data[at:at] = data[start : start + draw.choice((1, 8, 500))]
        elif kind == 7 and len(data) >= 8:
            number = draw.choice((0, -1, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63)))
            at = min(at, len(data) - 8) // 8 * 8
            data[at : at + 8] = struct.pack("<q", number)
        else:
            data[at : at + 1] = draw.choice(
                (b"\n", b"\x00", b",", b"{", b"]", b'"', b"\xc3", b"\r")
            )
    return bytes(data)


def mutate_json(value: Any, draw: random.Random) -> Any:
    """Return the value with one part of it replaced, removed, renamed or repeated."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice([*value])
        kind = draw.randrange(8)
        changed = dict(value)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[str(draw.choice(ODD_VALUES))[:2000]] = changed.pop(key)
        elif kind == 2:
            changed[key] = draw.choice(ODD_VALUES)
        else:
            changed[key] = mutate_json(value[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        kind = draw.randrange(4)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value * draw.choice((2, 50)) if len(value) < 100 else value + value[:1]
        return [*value[:at], mutate_json(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD_VALUES)


def mutate_lines(content: bytes, draw: random.Random) -> bytes:
    """Return JSON lines with some of their values changed."""
    lines = content.splitlines()
    for _ in range(draw.choice((1, 1, 2, 5))):
        if not lines:
            return b""
        at = draw.randrange(len(lines))
        kind = draw.randrange(8)
        if kind == 0:
            lines.insert(draw.randrange(len(lines) + 1), lines[at])
        elif kind == 1:
            lines[at] = draw.choice(ODD_TEXTS)
        else:
            try:
                value = mutate_json(json.loads(lines[at]), draw)
                lines[at] = json.dumps(value).encode()
            except (ValueError, RecursionError):
                lines[at] = lines[at][: len(lines[at]) // 2]
    return b"\n".join(lines) + b"\n"


def replace_file(path: Path, draw: random.Random) -> None:
    """Put something else where a file was: a link, a pipe, a folder, a device, nothing."""
    path.unlink()

    def unix_socket() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))

    ways: list[Callable[[], Any]] = [
        lambda: None,
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("/etc/passwd"),
        lambda: path.symlink_to(path),
        lambda: path.touch(mode=0),
        lambda: os.truncate(_made(path), 3 << 30),
        unix_socket,
    ]
    try:
        draw.choice(ways)()
    except OSError:
        path.touch()


def remove(path: Path) -> None:
    """Remove a file, folder or link of any kind."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _made(path: Path) -> Path:
    path.touch()
    return path

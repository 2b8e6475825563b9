"""Read TensorBoard event files of any writer.

The framing is read here and not by TensorBoard, which allocates what a file asks for: 158 bytes can
ask for 16 GiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from distmon.errors import ConfigError
from distmon.replay.logs import Log, LogError
from distmon.untrusted.files import is_file, open_regular
from distmon.untrusted.values import LARGEST_INT, encodable

LARGEST_EVENT: Final = 1 << 20
"""Bytes of an event that may hold scalars; images, graphs and histograms are larger."""
MOST_BYTES: Final = 1 << 30
MOST_TAGS: Final = 10_000
_NUMBERS: Final = {1: ("<f", "float_val"), 2: ("<d", "double_val"), 3: ("<i", "int_val")} | {
    9: ("<q", "int64_val")
}
"""By the number of a tensor's type: its bytes, and the list that may hold the value instead."""


def is_event_file(path: Path) -> bool:
    """Return whether it is an event file, by its name as TensorBoard does."""
    return "tfevents" in path.name


def read_events(path: Path) -> Log:
    """Read all scalars of a folder of event files or of one file; a repeated step replaces."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise ConfigError(
            "reading TensorBoard files needs a package: pip install 'distmon[tensorboard]'"
        ) from None
    files = [path] if is_file(path) else sorted(filter(is_event_file, path.iterdir()))
    columns: dict[str, dict[int, float]] = {}
    times: dict[int, float] = {}
    problems: list[str] = []
    for content in chain.from_iterable(_events(file, problems) for file in files):
        event: Any = Event()
        try:
            event.ParseFromString(content)
        except Exception as error:  # of google.protobuf, which need not be importable by name
            problems.append(f"an event is damaged and was skipped ({type(error).__name__})")
            continue
        if abs(event.step) >= LARGEST_INT:
            continue
        for value in event.summary.value:
            found = _scalar(value)
            tag = encodable(value.tag)
            if found is not None and (tag in columns or len(columns) < MOST_TAGS):
                columns.setdefault(tag, {})[event.step] = found
                times[event.step] = event.wall_time
    if not columns:
        raise LogError(f"{path} holds no scalars" + (f": {problems[0]}" if problems else ""))
    return Log(columns, times, problems=tuple(dict.fromkeys(problems)))


def _scalar(value: Any) -> float | None:
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if value.WhichOneof("value") != "tensor":
        return None
    # Newer writers store a scalar as a 0-dimensional tensor.
    tensor = value.tensor
    if any(dim.size != 1 for dim in tensor.tensor_shape.dim) or tensor.dtype not in _NUMBERS:
        return None
    form, listed = _NUMBERS[tensor.dtype]
    if len(tensor.tensor_content) == struct.calcsize(form):
        return float(struct.unpack(form, tensor.tensor_content)[0])
    values = getattr(tensor, listed)
    return float(values[0]) if len(values) == 1 else None


def _events(path: Path, problems: list[str]) -> Iterator[bytes]:
    """Yield the records of a file: length, its checksum, content, its checksum."""
    try:
        with open_regular(path) as file:
            yield from _records(file, path.name, problems)
    except OSError as error:
        problems.append(f"cannot read {path.name}: {error.strerror or error}")


def _records(file: BinaryIO, name: str, problems: list[str]) -> Iterator[bytes]:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    size = file.seek(0, 2)
    offset = file.seek(0)
    while offset < min(size, MOST_BYTES):
        head = file.read(12)
        length = int.from_bytes(head[:8], "little")
        end = offset + 12 + length + 4
        if len(head) < 12 or end > size:
            problems.append(f"{name} ends in the middle of an event")
            return
        if masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little"):
            problems.append(f"{name} is damaged at byte {offset}: the rest of it is not read")
            return
        if length <= LARGEST_EVENT:
            content = file.read(length)
            if masked_crc32c(content) == int.from_bytes(file.read(4), "little"):
                yield content
            else:
                problems.append(f"{name} has damaged events, which were skipped")
        offset = file.seek(end)

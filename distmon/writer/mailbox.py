"""Messages to the writer process: their bytes lie in shared memory, a pipe says where.

Sending never blocks: without room in the memory a message is refused, and while the pipe is full
its place is sent later. Bytes stay until the writer has confirmed them, so that another writer can
take over what the first has not finished.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
import threading
from collections import deque
from typing import Any, Final

NOTE: Final = struct.Struct("<QQQ")
"""Number, offset and length of a message; a pipe transfers it in one piece."""
PRINTED: Final = 2**64 - 1
"""As an offset: the training process has printed the text with this number."""
FLUSH: Final = 2**64 - 2
"""As an offset: the training process waits for the answers to what was sent before."""
_HANDLED: Final = struct.Struct("<QQ")
"""At the end of the memory: numbers of the messages that the writer has started to handle, and has
handled, last. The answer to one that it has handled may be lost when it ends."""
_ALIGNMENT: Final = 64
_PAGE: Final = 4096
_LEAST_BYTES: Final = 32 << 20
_LEAST_MESSAGES: Final = 3
"""Room for messages: pages that are never used take no memory."""


def shared_file() -> int:
    """Return a file in memory that has no name, or one among the temporary files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("distmon-writer")
    descriptor, path = tempfile.mkstemp(prefix="distmon-writer-")
    os.unlink(path)
    return descriptor


def encode(message: object) -> list[memoryview]:
    """Return a message as parts that are to lie one after another; arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *[buffer.raw() for buffer in buffers]]
    head = struct.pack(f"<Q{len(parts)}Q", len(parts), *map(len, parts))
    return [memoryview(head), *parts]


def decode(raw: memoryview) -> Any:
    """Return the message; its arrays are copies."""
    (count,) = struct.unpack_from("<Q", raw)
    sizes = struct.unpack_from(f"<{count}Q", raw, 8)
    at, parts = 8 + 8 * count, []
    for size in sizes:
        parts.append(bytearray(raw[at : at + size]))
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])


class Mailbox:
    """The training process's end. Any of its threads may send."""

    def __init__(self) -> None:
        self.file = shared_file()
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._capacity = 0
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, tuple[int, int]] = {}
        """Offset and length of the messages that are not confirmed, in order."""
        self._unnoted: deque[int] = deque()
        """Those of them of which the writer does not know yet, since the pipe was full."""
        self._pipe = -1

    def allocate(self, largest: int, reserved: int) -> None:
        """Make room for several messages of `largest` bytes, and for one first of `reserved`.

        The pages of one are touched, so that the first large message does not have to.
        """
        self._capacity = max(_LEAST_BYTES, _LEAST_MESSAGES * largest)
        size = self._capacity + reserved + _HANDLED.size
        os.ftruncate(self.file, size)
        self._memory = mmap.mmap(self.file, size)
        self._view = memoryview(self._memory)
        for at in range(0, largest, _PAGE):
            self._view[at] = 0

    def connect(self, pipe: int, first: object) -> None:
        """Send to a new writer from now on: `first`, then what is not confirmed."""
        parts = encode(first)
        length = sum(map(len, parts))
        with self._lock:
            self._pipe = pipe
            if self._capacity + length > len(self._view) - _HANDLED.size:
                raise BufferError(f"the first message has {length} bytes")
            self._write(parts, self._capacity)
            self._note(0, self._capacity, length)
            self._unnoted = deque(self._waiting)
            self._note_waiting()

    def send(self, message: object) -> int | None:
        """Return the number of the message; None when there is no room. Never blocks."""
        parts = encode(message)
        length = sum(map(len, parts))
        with self._lock:
            offset = self._find_room(length)
            if offset is None or 2 * (offset + length) > self._capacity:
                self._note(0, FLUSH, 0)  # room is needed before the answers come
            if offset is None:
                return None
            self._write(parts, offset)
            self._number += 1
            self._waiting[self._number] = (offset, length)
            self._unnoted.append(self._number)
            self._note_waiting()
            return self._number

    def printed(self, number: int) -> None:
        """Confirm that the texts of the writer up to this number have been printed."""
        with self._lock:
            self._note(number, PRINTED, 0)  # if it is lost, the next one confirms both

    def ask_for_answers(self) -> None:
        """Let the writer send its answers without delay, once it has them."""
        with self._lock:
            self._note(0, FLUSH, 0)

    def confirm(self, number: int) -> None:
        """Free the room of a message that the writer has finished."""
        with self._lock:
            self._waiting.pop(number, None)
            self._note_waiting()

    def unfinished(self) -> int | None:
        """Return the message that a writer which has ended was handling; None if there is none."""
        with self._lock:
            started, handled = _HANDLED.unpack(self._view[-_HANDLED.size :])
            return started if started in self._waiting and started != handled else None

    def handled(self) -> list[int]:
        """Return the messages that a writer which has ended had handled, and not confirmed."""
        with self._lock:
            _, handled = _HANDLED.unpack(self._view[-_HANDLED.size :])
            return [number for number in self._waiting if number <= handled]

    def unreceived(self) -> list[int]:
        """Return the messages of which no writer knows."""
        with self._lock:
            return [*(self._unnoted if self._pipe >= 0 else self._waiting)]

    def forget(self) -> None:
        """Free all messages: there is no writer any more."""
        with self._lock:
            self._waiting.clear()
            self._unnoted.clear()
            self.disconnect()

    def pause(self) -> None:
        """Close the pipe; messages wait for the next writer."""
        with self._lock:
            self.disconnect()

    def disconnect(self) -> None:
        """Close the pipe, which ends the writer."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def close(self) -> None:
        """Release the memory."""
        with self._lock:
            self.disconnect()
            if self.file >= 0:
                self._view.release()
                if self._memory is not None:
                    self._memory.close()
                os.close(self.file)
                self.file = -1

    def _write(self, parts: list[memoryview], at: int) -> None:
        for part in parts:
            end = at + len(part)
            self._view[at:end] = part
            at = end

    def _note_waiting(self) -> None:
        """Send the places that the writer does not know, in order, while the pipe has room."""
        while self._unnoted:
            place = self._waiting.get(self._unnoted[0])
            if place is not None and not self._note(self._unnoted[0], *place):
                return
            self._unnoted.popleft()

    def _note(self, number: int, offset: int, length: int) -> bool:
        """Return False when the pipe is full. Without a writer the next one gets the message."""
        try:
            if self._pipe >= 0:
                os.write(self._pipe, NOTE.pack(number, offset, length))
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass  # the writer has ended; `connect` sends what waits to the next one
        return True

    def _find_room(self, length: int) -> int | None:
        """Return the lowest free offset: memory that was just used is in the caches."""
        at = 0
        for offset, taken in sorted(self._waiting.values()):
            if offset - at >= length:
                break
            at = -(-(offset + taken) // _ALIGNMENT) * _ALIGNMENT
        return at if at + length <= self._capacity else None


class Inbox:
    """The writer's end."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory: mmap.mmap | None = None
        self._handled = 0

    def read(self, number: int, offset: int, length: int) -> Any:
        """Return a message, and note for the training process that it is being handled."""
        if self._memory is None or len(self._memory) < offset + length:
            self._memory = mmap.mmap(self._file, 0)
        self._note(number, self._handled)
        with memoryview(self._memory) as view, view[offset : offset + length] as raw:
            return decode(raw)

    def handled(self, number: int) -> None:
        """Note that a message has been handled, before its answer is sent."""
        self._handled = max(self._handled, number)
        self._note(number, self._handled)

    def _note(self, started: int, handled: int) -> None:
        if self._memory is not None:
            at = len(self._memory) - _HANDLED.size
            _HANDLED.pack_into(self._memory, at, started, handled)


class Notes:
    """Splits what was read from a pipe into notes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, int, int]]:
        """Return the whole notes."""
        data = self._rest + data
        whole = len(data) // NOTE.size * NOTE.size
        self._rest = data[whole:]
        return [*NOTE.iter_unpack(data[:whole])]

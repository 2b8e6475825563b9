"""Answers of the writer process: a pipe back to the training process."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
from typing import Any, Self


class Answers:
    """The reading end of the pipe on which a writer answers: pickled, each after its length."""

    def __init__(self, pipe: int) -> None:
        self._stream = os.fdopen(pipe, "rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the pipe; not while a thread reads."""
        self._stream.close()

    def read(self) -> tuple[Any, ...] | None:
        """Wait for the next answer and return it; None when the writer has ended."""
        head = self._stream.read(8)
        if len(head) < 8:
            return None
        (length,) = struct.unpack("<Q", head)
        body = self._stream.read(length)
        if len(body) < length:  # the writer was killed while it sent
            return None
        answer: tuple[Any, ...] = pickle.loads(body)
        return answer


class AnswerPipe:
    """The writing end of it. Several answers are sent together, so that the training process, where
    each of them interrupts the training thread, wakes up once for all of them."""

    def __init__(self, pipe: int, delay_s: float) -> None:
        """`delay_s`: longest time that an answer waits for others."""
        self._pipe = pipe
        self._delay = delay_s
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._any = threading.Event()
        self._sending = threading.Lock()
        threading.Thread(target=self._run, name="distmon-answers", daemon=True).start()

    def send(self, answer: tuple[Any, ...]) -> None:
        """Send an answer soon, from any thread."""
        body = pickle.dumps(answer, protocol=5)
        with self._lock:
            self._waiting.append(struct.pack("<Q", len(body)) + body)
        self._any.set()

    def flush(self) -> None:
        """Send what waits, whole and in order. Without a reader it is dropped."""
        with self._sending:
            with self._lock:
                waiting, self._waiting = self._waiting, []
                self._any.clear()
            data = memoryview(b"".join(waiting))
            try:
                while data:
                    data = data[os.write(self._pipe, data) :]
            except BrokenPipeError:  # the training process has ended
                return

    def _run(self) -> None:
        while True:
            self._any.wait()
            time.sleep(self._delay)
            self.flush()

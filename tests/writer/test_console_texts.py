"""Console output on its way from the writer: bounded while standard output is blocked."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest

from distmon.runtime import training_side
from distmon.runtime.training_side import Printer
from distmon.writer import session
from distmon.writer.session import Texts


class _Blocked(io.StringIO):
    """Standard output that nobody reads until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.free = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.free.wait(60)
        return super().write(text)


def test_texts_that_the_printer_drops_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_side, "_MOST_TEXTS", 2)
    blocked = _Blocked()
    monkeypatch.setattr(sys, "stdout", blocked)
    printer = Printer(lambda number: texts.printed(number))

    def answer(message: tuple[Any, ...]) -> None:
        printer.print(*message[1:])

    texts = Texts(answer)
    texts.send("1 ")
    assert blocked.entered.wait(60)
    for number in range(2, 10):
        texts.send(f"{number} ")
    assert texts.rest() == "1 2 3 4 5 6 7 8 9 "  # what a killed training has not printed
    blocked.free.set()
    while len(texts.rest()) > len("4 5 6 7 8 9 "):
        blocked.entered.wait(0.01)
    texts.send("10 ")
    printer.close(60)
    assert blocked.getvalue() == "1 2 3 10 "
    assert texts.rest() == ""


def test_blocked_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_TEXT", 8, raising=False)
    texts = Texts(lambda _: None)
    for _ in range(1000):
        texts.send("text")
    assert texts.rest() == "texttext"
    texts.printed(1)
    texts.send("more")
    assert texts.rest() == "textmore"

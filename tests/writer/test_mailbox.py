"""Messages in shared memory: bounded in bytes, never blocking, kept until they are confirmed."""

from __future__ import annotations

import os

import numpy as np
import pytest

from distmon.writer import mailbox as module
from distmon.writer.answers import AnswerPipe, Answers
from distmon.writer.mailbox import FLUSH, Inbox, Mailbox, Notes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Mailbox:
    monkeypatch.setattr(module, "_LEAST_BYTES", 64 << 10)
    box = Mailbox()
    box.allocate(1 << 10, 4 << 10)
    return box


def pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


def received(box: Mailbox, read: int) -> list[object]:
    notes = Notes().feed(os.read(read, 1 << 16))
    return [Inbox(box.file).read(*note) for note in notes]


def test_messages_arrive_in_order_with_their_arrays(small: Mailbox) -> None:
    read, write = pipe()
    small.connect(write, "first")
    numbers = [small.send(("values", np.arange(n, dtype=np.float64))) for n in (0, 3, 1000)]
    assert numbers == [1, 2, 3]
    first, *others = received(small, read)
    assert first == "first"
    for n, (name, values) in zip((0, 3, 1000), others, strict=True):  # type: ignore[misc]
        assert name == "values"
        np.testing.assert_array_equal(values, np.arange(n))
    small.close()


def test_memory_is_bounded_and_freed_in_any_order(small: Mailbox) -> None:
    _, write = pipe()
    small.connect(write, None)
    large = np.zeros(2500)
    assert [small.send(large) for _ in range(4)] == [1, 2, 3, None]
    small.confirm(2)
    assert small.send(np.zeros(5000)) is None  # two holes are not one
    assert small.send(large) == 4
    small.close()


def test_answers_are_asked_for_when_half_of_the_memory_is_taken(small: Mailbox) -> None:
    read, write = pipe()
    small.connect(write, None)
    os.read(read, 1 << 16)
    asked = []
    for _ in range(4):
        small.send(np.zeros(2500))
        asked.append(any(note[1] == FLUSH for note in Notes().feed(os.read(read, 1 << 16))))
    assert asked == [False, True, True, True]  # the last one was refused
    small.close()


def test_a_full_pipe_does_not_block_and_loses_nothing(small: Mailbox) -> None:
    read, write = pipe()
    small.connect(write, None)
    filled = 0
    while True:
        try:
            filled += os.write(write, b"0" * 1024)
        except BlockingIOError:
            break
    assert [small.send("a"), small.send("b"), small.send("c")] == [1, 2, 3]
    assert len(os.read(read, 24 + filled)) == 24 + filled  # the first message, and what filled it
    small.confirm(2)
    assert received(small, read) == ["a", "c"]
    small.close()


def test_the_next_writer_gets_more_than_a_pipe_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 1 << 20)
    box = Mailbox()
    box.allocate(1 << 10, 4 << 10)
    count = 4000  # the pipe holds 2730 notes
    for number in range(count):
        assert box.send(number) is not None
    read, write = pipe()
    box.connect(write, None)
    found: list[object] = []
    while len(found) < 1 + count:
        found += received(box, read)
        box.confirm(len(found) - 1)
    assert found == [None, *range(count)]
    box.close()


def test_the_next_writer_gets_what_was_not_confirmed(small: Mailbox) -> None:
    read, write = pipe()
    small.connect(write, "first")
    for text in ("a", "b", "c"):
        small.send(text)
    small.confirm(1)
    os.close(read)
    small.send("d")  # to a writer that has ended
    small.disconnect()
    small.send("e")  # without one
    read, write = pipe()
    small.connect(write, "again")
    assert small.unfinished() is None  # nobody has started with one
    assert received(small, read) == ["again", "b", "c", "d", "e"]
    assert small.unfinished() == 5  # the last one that was read
    small.confirm(5)
    assert small.unfinished() is None
    small.close()


def test_what_a_writer_has_handled_is_known_though_its_answer_is_lost(small: Mailbox) -> None:
    read, write = pipe()
    small.connect(write, None)
    assert [small.send(i) for i in range(3)] == [1, 2, 3]
    inbox = Inbox(small.file)
    _, first, second, _ = Notes().feed(os.read(read, 1 << 16))
    inbox.read(*first)
    inbox.handled(1)
    inbox.read(*second)
    assert small.handled() == [1]
    assert small.unfinished() == 2
    inbox.handled(2)
    assert small.handled() == [1, 2]
    assert small.unfinished() is None
    small.close()


def test_answers_are_sent_together() -> None:
    read, write = pipe()
    answers = AnswerPipe(write, delay_s=1000.0)
    for number in range(3):
        answers.send(("done", number, None))
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    answers.flush()
    with Answers(read) as received_answers:
        assert [received_answers.read() for _ in range(3)] == [("done", i, None) for i in range(3)]


def test_an_end_in_the_middle_of_an_answer_is_an_end() -> None:
    read, write = pipe()
    os.write(write, (100).to_bytes(8, "little") + b"half")
    os.close(write)
    with Answers(read) as received_answers:
        assert received_answers.read() is None
        assert received_answers.read() is None


def test_answers_without_a_reader_are_dropped() -> None:
    read, write = pipe()
    answers = AnswerPipe(write, delay_s=1000.0)
    answers.send(("done", 1, None))
    os.close(read)
    answers.flush()
    # It is not kept for a reader that comes later.
    read, other = pipe()
    os.dup2(other, write)
    answers.flush()
    with pytest.raises(BlockingIOError):
        os.read(read, 1)

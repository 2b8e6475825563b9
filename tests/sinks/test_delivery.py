from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
from sample_run import MakeRecord

from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.sinks.base import Sink
from distmon.sinks.delivery import Delivery

LONG_S = 60.0


class Listing:
    """Remembers what it got; `act` runs first and may wait or raise."""

    def __init__(self, act: Callable[[object], None] = lambda _: None) -> None:
        self.act = act
        self.got: list[tuple[str, int]] = []
        self.closed = 0

    def record(self, record: Record) -> None:
        self.act(record)
        self.got.append(("record", record.step))

    def alert(self, alert: Alert) -> None:
        self.act(alert)
        self.got.append(("alert", alert.step))

    def close(self) -> None:
        self.closed += 1


def alert_at(step: int) -> Alert:
    return Alert("frozen", "warning", step, "it is frozen")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_everything_arrives_in_order_and_sinks_are_closed(make_record: MakeRecord) -> None:
    sink = Listing()
    delivery = Delivery([("list", lambda: sink)], queue_size=100)
    for step in range(20):
        delivery.post_record(make_record(step))
        delivery.post_alert(alert_at(step))
    assert delivery.close(LONG_S) == {"list": {"written": 40, "failed": 0, "dropped": 0}}
    assert sink.got == [(kind, step) for step in range(20) for kind in ("record", "alert")]
    assert sink.closed == 1
    delivery.post_record(make_record(99))
    assert delivery.close(LONG_S)["list"] == {"written": 40, "failed": 0, "dropped": 1}
    assert sink.closed == 1


def test_a_hanging_sink_blocks_neither_the_others_nor_close(
    make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    stuck, fine = Listing(lambda _: release.wait() and None), Listing()
    delivery = Delivery([("stuck", lambda: stuck), ("fine", lambda: fine)], queue_size=4)
    start = time.perf_counter()
    for step in range(4):
        delivery.post_record(make_record(step, params=1))
        delivery.post_alert(alert_at(step))
    posting = time.perf_counter() - start
    wait_until(lambda: len(fine.got) == 8)
    begun = time.perf_counter()
    with caplog.at_level(logging.WARNING, "distmon"):
        stats = delivery.close(0.3)
    # Without a limit each of them would wait for ever.
    assert time.perf_counter() - begun < LONG_S
    assert posting < LONG_S
    assert stats["fine"] == {"written": 8, "failed": 0, "dropped": 0}
    assert stats["stuck"] == {"written": 0, "failed": 1, "dropped": 7}
    assert fine.closed == 1
    assert [message for message in caplog.messages if '"stuck"' in message] == [
        'distmon: the sink "stuck" did not finish within 0.3 s and was abandoned: '
        "0 written, 1 failed, 7 dropped"
    ]
    release.set()
    wait_until(lambda: stuck.closed == 1)
    assert delivery.stats()["stuck"] == {"written": 0, "failed": 1, "dropped": 7}


def test_a_failing_sink_is_counted_named_once_and_stays_in_use(
    make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_on_odd(item: object) -> None:
        if isinstance(item, Record) and item.step % 2:
            raise OSError("disk\nfull") if item.step < 5 else SystemExit(3)

    sink = Listing(fail_on_odd)
    delivery = Delivery([("bad", lambda: sink)], queue_size=100)
    with caplog.at_level(logging.WARNING, "distmon"):
        for step in range(10):
            delivery.post_record(make_record(step, params=1))
        stats = delivery.close(LONG_S)
    assert stats["bad"] == {"written": 5, "failed": 5, "dropped": 0}
    assert [step for _, step in sink.got] == [0, 2, 4, 6, 8]
    assert caplog.messages == [
        'distmon: the sink "bad" failed on one item and stays in use: OSError: disk full',
        'distmon: the sink "bad" is incomplete: 5 written, 5 failed, 0 dropped',
    ]


def test_a_full_queue_drops_the_newest_and_alerts_pass_records(make_record: MakeRecord) -> None:
    release, entered = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        entered.set()
        release.wait(5)

    sink = Listing(wait)
    delivery = Delivery([("slow", lambda: sink)], queue_size=3)
    delivery.post_record(make_record(0, params=1))
    assert entered.wait(5)
    for step in range(1, 11):
        delivery.post_record(make_record(step, params=1))
    delivery.post_alert(alert_at(10))
    assert delivery.stats()["slow"]["dropped"] == 7
    release.set()
    assert delivery.close(LONG_S)["slow"] == {"written": 5, "failed": 0, "dropped": 7}
    assert sink.got == [*(("record", step) for step in range(4)), ("alert", 10)]


def test_a_sink_that_cannot_be_made_is_named_once(
    make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def factory() -> Sink:
        tries.append(1)
        raise RuntimeError("no login")

    delivery = Delivery([("web", factory)], queue_size=10)
    with caplog.at_level(logging.WARNING, "distmon"):
        for step in range(3):
            delivery.post_record(make_record(step, params=1))
        stats = delivery.close(LONG_S)
    assert stats["web"] == {"written": 0, "failed": 3, "dropped": 0}
    assert tries
    named = [message for message in caplog.messages if "no login" in message]
    assert named == [
        'distmon: the sink "web" could not be opened and is tried again: RuntimeError: no login'
    ]


def test_a_slow_factory_delays_no_other_sink_and_loses_nothing(make_record: MakeRecord) -> None:
    sink, fine, posted = Listing(), Listing(), threading.Event()

    def factory() -> Sink:
        assert posted.wait(LONG_S)
        return sink

    delivery = Delivery([("slow", factory), ("fine", lambda: fine)], queue_size=10)
    for _ in range(5):
        delivery.post_record(make_record(1, params=1))
    wait_until(lambda: len(fine.got) == 5)
    assert not sink.got
    posted.set()
    assert delivery.close(LONG_S)["slow"]["written"] == 5


def test_a_sink_that_got_nothing_is_never_made() -> None:
    def factory() -> Sink:
        raise AssertionError

    assert Delivery([("x", factory)], 1).close(1) == {
        "x": {"written": 0, "failed": 0, "dropped": 0}
    }


def test_an_error_while_closing_is_counted(
    make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    class BadEnd(Listing):
        def close(self) -> None:
            raise OSError("gone")

    delivery = Delivery([("end", BadEnd)], 1)
    with caplog.at_level(logging.WARNING, "distmon"):
        delivery.post_record(make_record(1, params=1))
        assert delivery.close(LONG_S)["end"] == {"written": 1, "failed": 1, "dropped": 0}
    assert caplog.messages[0] == 'distmon: the sink "end" failed to close: OSError: gone'

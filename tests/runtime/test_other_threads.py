"""What is asked of a monitor on another thread than that of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_outbox import make_late
from small_runs import quiet, small_model, train

import distmon


def _elsewhere(call: Callable[[], Any]) -> Any:
    """The result of `call` on a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_on_alert_may_ask_for_the_last_record(tmp_path: Path, caplog: Any) -> None:
    """The evaluation that calls it has not finished: to wait for it would end `on_alert`."""
    asked: list[int] = []

    def on_alert(_: distmon.Alert) -> None:
        record = monitor.last_record
        asked.append(0 if record is None else record.step)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    always = {"when": "update_ratio_max > 0", "patience": 1, "cooldown": 0}
    settings = quiet(tmp_path, rules={"always": always}, callback_timeout_s=0.5)
    with distmon.attach(model, optimizer, **settings, on_alert=on_alert) as monitor:
        train(model, optimizer, monitor, range(1, 4))
    assert asked
    assert "on_alert failed" not in caplog.text


def test_another_thread_takes_nothing_in(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        train(model, optimizer, monitor, range(1, 3))
        outbox = make_late(monitor)
        outbox.release()
        saved = monitor.state_dict()
        polls: list[int] = []
        poll = outbox.first_arrived
        outbox.first_arrived = lambda: polls.append(1) or poll()  # type: ignore
        assert _elsewhere(lambda: monitor.last_record).step == 2
        assert _elsewhere(monitor.state_dict) == saved
        assert not polls
        assert monitor.last_record.step == 2
        assert polls


def test_a_state_that_was_never_taken_is_named(tmp_path: Path, caplog: Any) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        train(model, optimizer, monitor, range(1, 3))
        assert _elsewhere(monitor.state_dict) == {}
    assert "called on another thread than step" in caplog.text


class _HeldStep:
    """A step that stays where ranks exchange, on a thread of its own, until it is released."""

    def __init__(self, monitor: distmon.Monitor) -> None:
        self.order: list[str] = []
        self.inside, self.release = threading.Event(), threading.Event()
        self._monitor = monitor
        cycle = monitor.cycle
        run, flush = cycle.run, cycle.flush

        def held_run() -> None:
            self.inside.set()
            assert self.release.wait(60)
            run()
            self.order.append("step")

        def noted_flush() -> None:
            self.order.append("close")
            flush()

        cycle.run = held_run  # type: ignore
        cycle.flush = noted_flush  # type: ignore
        self._thread = threading.Thread(target=self._step)

    def _step(self) -> None:
        try:
            self._monitor.step(loss=1.0)
        except BaseException as error:
            self.order.append(f"raised {error!r}")

    def __enter__(self) -> _HeldStep:
        self._thread.start()
        assert self.inside.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._thread.join(60)


def test_close_on_another_thread_comes_after_the_step_that_runs(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path, interval=2))
    train(model, optimizer, monitor, range(1, 4))
    closing = threading.Thread(target=monitor.close)
    with _HeldStep(monitor) as held:
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        assert not monitor.closed
        assert not held.order
    closing.join(60)
    assert held.order == ["step", "close"]
    assert monitor.closed
    assert [r["step"] for r in distmon.read_run(tmp_path / "run").records][:2] == [2, 4]


def test_a_step_that_takes_long_closes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmon.runtime.lifetime.PATIENCE_S", 0.05)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path, interval=2))
    train(model, optimizer, monitor, range(1, 4))
    with _HeldStep(monitor) as held:
        monitor.close()
        assert not monitor.closed
    assert held.order == ["step", "close"]
    assert monitor.closed
    assert len(monitor.hooks) == 0

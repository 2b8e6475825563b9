"""What is asked of a monitor on another thread than that of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

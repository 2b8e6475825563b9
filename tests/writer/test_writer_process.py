"""The writer process: the same records as a thread, through the death of either process."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.progress import Progress
from small_runs import quiet, small_model, train

import distmon
from distmon import Monitor, read_run
from distmon.rules.alert import Alert
from distmon.rules.base import Finding
from distmon.runtime import writer_start
from distmon.runtime.worker import EvaluationWorker
from distmon.runtime.writer_process import WriterProcess
from distmon.runtime.writer_start import Restarts
from distmon.writer.evaluator import Evaluated
from distmon.writer.main import is_urgent

LONG_S = 240.0


def attached(folder: Path, **settings: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A small model with its monitor; with a writer process, unless the settings say otherwise."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"writer": "process", **settings}
    here = {
        name: given.pop(name)
        for name in ("writer", "own_rules", "on_alert", "console")
        if name in given
    }
    monitor = distmon.attach(model, optimizer, quiet(folder, **given), **here)
    assert isinstance(monitor, Monitor)
    return model, optimizer, monitor


def ended(pid: int) -> bool:
    """Wait for the end of a process that may not be a child; return whether it has ended."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_records_state_and_files_are_those_of_a_thread(tmp_path: Path) -> None:
    runs, states = [], []
    for writer in ("thread", "process"):
        model, optimizer, monitor = attached(tmp_path / writer, writer=writer)
        expected = WriterProcess if writer == "process" else EvaluationWorker
        assert isinstance(monitor.cycle.worker, expected)
        records = train(model, optimizer, monitor, range(1, 5))
        assert [record.step for record in records] == [1, 2, 3, 4]
        states.append(monitor.state_dict())
        monitor.close()
        assert monitor.last_record is not None
        assert monitor.last_record.step == 4  # also without a writer
        runs.append((records, read_run(tmp_path / writer / "run")))
    (threaded, by_thread), (processed, by_process) = runs
    for one, other in zip(threaded, processed, strict=True):
        for tag in ("monitor/grad_norm", "train/step_loss", "monitor/update_ratio_median"):
            assert one.metrics[tag] == other.metrics[tag]
        for name, column in one.params.columns.items():
            np.testing.assert_array_equal(column, other.params.columns[name])
    assert len(by_process.records) == len(by_thread.records) == 4
    assert len(by_process.params) == len(by_thread.params)
    for name in ("record", "rules"):
        assert states[0]["cycle"][name].keys() == states[1]["cycle"][name].keys()
    assert states[0]["cycle"]["record"] == states[1]["cycle"]["record"]


def test_a_state_is_loaded_into_the_writer(tmp_path: Path) -> None:
    model, optimizer, monitor = attached(tmp_path)
    train(model, optimizer, monitor, range(1, 4))
    state = monitor.state_dict()
    monitor.close()
    _, _, resumed = attached(tmp_path)
    resumed.load_state_dict(state)
    assert resumed.cycle.worker.state_dict() == monitor.cycle.worker.state_dict()
    resumed.close()


@distmon.rule(severity="critical")
def every_second_step(record: Any, _: Any, memory: dict[str, Any]) -> Iterator[Finding]:
    """Fire at even steps."""
    memory["seen"] = memory.get("seen", 0) + 1
    if record.step % 2 == 0:
        yield Finding(key=str(record.step), message=f"{len(record.params)} parameters")


def test_functions_of_the_user_stay_in_this_process(tmp_path: Path) -> None:
    called: list[tuple[int, str]] = []
    console = Console(record=True, file=io.StringIO(), width=200)
    model, optimizer, monitor = attached(
        tmp_path,
        own_rules=[every_second_step],
        on_alert=lambda alert: called.append((os.getpid(), alert.rule)),
        console=console,
        sinks=["console", "jsonl"],
    )
    train(model, optimizer, monitor, range(1, 5))
    state = monitor.state_dict()
    monitor.close()
    assert called.count((os.getpid(), "every_second_step")) == 2
    assert state["cycle"]["rules"]["rules"]["every_second_step"]["memory"] == {"seen": 4}
    alerts = [alert["rule"] for alert in read_run(tmp_path / "run").alerts]
    assert alerts.count("every_second_step") == 2
    printed = console.export_text()
    assert printed.count("grad_norm:") == 4
    assert printed.count("every_second_step at step") == 2


def test_lines_for_a_console_of_the_user_are_formatted_in_the_writer(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True, color_system="truecolor")
    bar = Progress(console=console)
    model, optimizer, monitor = attached(tmp_path, console=console, sinks=["console"])
    with bar:
        bar.add_task("train", total=2)
        train(model, optimizer, monitor, range(1, 3))
        threads = {thread.name for thread in threading.enumerate()}
        monitor.close()
    assert "distmon-console" not in threads
    lines = [line.plain for line in AnsiDecoder().decode(file.getvalue())]
    shown = [line.lstrip() for line in lines if "grad_norm:" in line]
    assert [line[:6] for line in shown] == ["step:1", "step:2"]
    assert not [line for line in lines if not line.strip()][1:]  # but the end of the bar
    assert "\x1b[" in file.getvalue()
    assert any(line.startswith("train ") for line in lines)


def written(folder: Path, last: int) -> list[int]:
    """Wait until the record of step `last` is in the file; return all steps."""
    deadline, steps = time.monotonic() + LONG_S, list[int]()
    while last not in steps and time.monotonic() < deadline:
        time.sleep(0.02)
        steps = [record["step"] for record in read_run(folder).records]
    return steps


def attempts(folder: Path) -> list[int]:
    """Return the attempts in `run.json`."""
    info = json.loads((folder / "run" / "run.json").read_text())
    return [entry["attempt"] for entry in info["attempts"]]


def observe(model: Any, optimizer: Any, monitor: Any, steps: int) -> None:
    """Train without waiting for the writer."""
    for _ in range(steps):
        loss = model(torch.zeros(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)


def test_an_attempt_that_no_writer_has_begun_is_begun_by_the_next(tmp_path: Path) -> None:
    model, optimizer, monitor = attached(tmp_path, sinks=["jsonl"])
    first = monitor.cycle.worker.process.pid
    os.kill(first, signal.SIGSTOP)
    observe(model, optimizer, monitor, 2)
    os.kill(first, signal.SIGKILL)
    assert monitor.cycle.settle(LONG_S)
    monitor.close()
    assert attempts(tmp_path) == [0]
    assert [record["step"] for record in read_run(tmp_path / "run").records] == [1, 2]


def test_a_killed_writer_is_replaced_again_and_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "distmon")
    model, optimizer, monitor = attached(tmp_path, sinks=["console", "jsonl"])
    worker = monitor.cycle.worker
    train(model, optimizer, monitor, range(1, 4))
    monitor.state_dict()
    first = worker.process.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first, number)  # as all processes of a job get them: it goes on
    train(model, optimizer, monitor, range(4, 5))
    assert worker.process.pid == first
    assert "libtorch" not in Path(f"/proc/{first}/maps").read_text()

    written(tmp_path / "run", 4)  # what the sinks of a killed writer have not written is lost
    os.kill(first, signal.SIGKILL)
    observe(model, optimizer, monitor, 4)  # some of them while there is no writer
    assert monitor.cycle.settle(LONG_S)
    assert worker.process.pid != first
    assert monitor.last_record.step == 8
    assert monitor.last_record.losses.keys() == {8}
    assert written(tmp_path / "run", 8) == [*range(1, 9)]
    assert attempts(tmp_path) == [0]

    monkeypatch.setattr(writer_start, "FIRST_PAUSE_S", 500.0)
    os.kill(worker.process.pid, signal.SIGKILL)
    assert ended(worker.process.pid)
    wait_for(lambda: worker.messages.absent)
    train(model, optimizer, monitor, range(9, 12), check=False)
    assert monitor.last_record.step == 8  # nobody waits for a writer that is not there
    monitor.close()  # which does not wait for the pause
    messages = " ".join(caplog.messages)
    assert "starting another one; " not in messages
    assert "starting another one in 500 s" in messages
    assert written(tmp_path / "run", 11) == [*range(1, 12)]
    assert "step:8 " in capfd.readouterr().out


def test_a_writer_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_start, "FIRST_PAUSE_S", 0.05)
    model, optimizer, monitor = attached(tmp_path, sinks=["jsonl"])
    observe(model, optimizer, monitor, 2)
    assert written(tmp_path / "run", 2) == [1, 2]
    real = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(monitor.cycle.worker.process.pid, signal.SIGKILL)
    wait_for(lambda: "no other writer process: it ended with code 1" in caplog.text)
    observe(model, optimizer, monitor, 2)
    monkeypatch.setattr(sys, "executable", real)
    assert written(tmp_path / "run", 4) == [1, 2, 3, 4]
    monitor.close()
    assert read_run(tmp_path / "run").problems == ()


def test_the_pause_before_another_writer_grows_until_one_is_steady() -> None:
    restarts = Restarts()
    assert [restarts.pause(0.0) for _ in range(4)] == [0.0, 10.0, 20.0, 40.0]
    assert max(restarts.pause(0.0) for _ in range(2000)) == writer_start.LONGEST_PAUSE_S
    assert restarts.pause(writer_start.STEADY_S) == 0.0


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class _Deadly:
    """A message that ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_message_that_ends_the_writer_is_dropped_and_a_steady_one_is_replaced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_start, "STEADY_S", 0.0)
    model, optimizer, monitor = attached(tmp_path, sinks=["jsonl"])
    worker, pids = monitor.cycle.worker, set[int]()
    for step in (1, 2):
        observe(model, optimizer, monitor, 1)
        assert monitor.cycle.settle(LONG_S)
        assert written(tmp_path / "run", step) == [*range(1, step + 1)]
        pids.add(worker.process.pid)
        assert worker.messages.send_observation(_Deadly(), 6 + step)
        assert monitor.cycle.settle(LONG_S)
    observe(model, optimizer, monitor, 1)
    assert monitor.cycle.settle(LONG_S)
    pids.add(worker.process.pid)
    monitor.close()
    assert len(pids) == 3
    assert caplog.text.count("the writer process ended (code 3); starting another one") == 2
    assert [record["step"] for record in read_run(tmp_path / "run").records] == [1, 2, 3]
    gaps = [json.loads(line) for line in (tmp_path / "run/gaps.jsonl").read_text().splitlines()]
    assert [(gap["what"], gap["step"], gap["count"]) for gap in gaps] == [
        ("record", 7, 1),
        ("record", 8, 1),
    ]


def test_no_interpreter_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    _, _, monitor = attached(tmp_path)
    assert isinstance(monitor.cycle.worker, EvaluationWorker)
    assert [m for m in caplog.messages if "no writer process" in m]
    monitor.close()


def test_a_program_that_is_no_interpreter_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    _, _, monitor = attached(tmp_path)
    assert isinstance(monitor.cycle.worker, EvaluationWorker)
    assert "it ended with code 1" in caplog.text
    monitor.close()


def test_a_killed_training_loses_nothing_and_imports_nothing(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_training.py")
    environment = {k: v for k, v in os.environ.items() if k != "DISTMON_WRITER"}
    outcome = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert outcome.returncode == -signal.SIGKILL, outcome.stderr
    said = dict(line.split(" ", 1) for line in outcome.stdout.splitlines() if line[0] in "wict")
    try:
        assert said["imported"] == "[]"
        threads = {*ast.literal_eval(said["threads"])} - {"distmon-print"}  # from its first text on
        assert threads == {"distmon-claim", "distmon-writer-answers"}
        assert ended(int(said["writer"]))
        run = read_run(tmp_path / "run")
        assert [record["step"] for record in run.records] == [*range(1, 13)]
        assert sorted({*run.params["step"].to_pylist()}) == [*range(1, 13)]
        for step in range(1, 13):
            assert f"step:{step} " in outcome.stdout
    finally:
        os.kill(int(said["child"]), signal.SIGKILL)


def test_what_training_acts_on_is_answered_at_once() -> None:
    alert = Alert("loss_spike", "warning", 7, "it rose", advice=("look at the batch",))
    assert is_urgent(Evaluated(7, (alert,)))
    assert is_urgent(Evaluated(7, (), failures={"mine": ValueError("no")}))
    assert is_urgent(Evaluated(7, (), read_in_full=(3,)))
    assert not is_urgent(Evaluated(7, ()))
    assert not is_urgent(None)

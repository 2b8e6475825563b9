"""A writer process that is late, stopped or gone at the end of a run: no record is lost unnamed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from small_runs import quiet
from test_writer_process import attached, observe, wait_for, written
from typer.testing import CliRunner

from distmon import read_run
from distmon.cli.main import app
from distmon.runtime import writer_process, writer_start, writer_supervisor
from distmon.sinks import delivery, gaps
from distmon.sinks.gaps import GapLog, LastObservation

COMPLETE = "no record is missing"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a writer that does not answer for moments only."""
    monkeypatch.setattr(writer_supervisor, "CLOSE_S", 0.1)
    monkeypatch.setattr(writer_supervisor, "PATIENCE_S", 0.1)
    monkeypatch.setattr(writer_process, "PATIENCE_S", 0.1)


def with_two_records(folder: Path) -> Any:
    """Return a training whose writer has written the first two steps."""
    model, optimizer, monitor = attached(folder, sinks=["jsonl"])
    observe(model, optimizer, monitor, 2)
    assert written(folder / "run", 2) == [1, 2]
    wait_for(lambda: not monitor.cycle.worker.messages.observations)
    return model, optimizer, monitor


def with_a_stopped_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the same, and stop its writer."""
    model, optimizer, monitor = with_two_records(folder)
    worker = monitor.cycle.worker
    os.kill(worker.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(worker, "settle", lambda *_: worker.messages.observations == 0)
    return model, optimizer, monitor


def closed_while_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    """Return the pid of a stopped writer, which has received 5 more steps, and its monitor."""
    model, optimizer, monitor = with_a_stopped_writer(folder, monkeypatch)
    pid = monitor.cycle.worker.process.pid
    observe(model, optimizer, monitor, 5)
    monitor.close()
    return pid, monitor


def shown(folder: Path) -> str:
    """Return what `distmon show` prints, without line breaks."""
    result = CliRunner().invoke(app, ["show", str(folder / "run")], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    return " ".join(result.stdout.split())


def gap_lines(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return kind, number, first and last step of the lines of `gaps.jsonl`."""
    file = folder / "run" / "gaps.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(gap["what"], gap["count"], gap["step"], gap["last_step"]) for gap in found]


def test_what_a_late_writer_has_not_written_is_named_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, _ = closed_while_late(tmp_path, monkeypatch)
    lacks = "records.jsonl lacks 5 of 7 observations of attempt 0: after step 2 up to the last"
    assert lacks in shown(tmp_path)
    assert COMPLETE not in shown(tmp_path)
    os.kill(pid, signal.SIGCONT)  # it has received them, and continues without the training
    assert written(tmp_path / "run", 7) == [*range(1, 8)]
    assert COMPLETE in shown(tmp_path)


def test_after_close_nothing_waits_for_a_stopped_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, monitor = closed_while_late(tmp_path, monkeypatch)
    monkeypatch.undo()  # waits are as long as in a run
    waits: list[float | None] = []
    monkeypatch.setattr(
        monitor.cycle.worker.messages.changed, "wait", lambda seconds=None: waits.append(seconds)
    )
    assert monitor.last_record is None or monitor.last_record.step <= 7
    assert not waits
    os.kill(pid, signal.SIGCONT)
    assert written(tmp_path / "run", 7) == [*range(1, 8)]


def test_what_the_pipe_has_no_room_for_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, monitor = with_a_stopped_writer(tmp_path, monkeypatch)
    worker = monitor.cycle.worker
    pid, sent = worker.process.pid, worker.messages
    note = sent.mailbox._note
    sent.mailbox._note = lambda number, *place: number <= 8 and note(number, *place)
    observe(model, optimizer, monitor, 12)
    waiting = {kind for kind in sent.unconfirmed.values() if isinstance(kind, int)}
    unknown = {kind for n, kind in sent.unconfirmed.items() if isinstance(kind, int) and n > 8}
    assert waiting == {*range(3, 15)}
    assert unknown
    monitor.close()
    listed = [gap for gap in gap_lines(tmp_path) if gap[0] == "record"]
    assert listed == [("record", len(unknown), min(unknown), 14)]
    os.kill(pid, signal.SIGCONT)
    assert written(tmp_path / "run", min(unknown) - 1)[-1] == min(unknown) - 1
    assert f"(steps {min(unknown)} to 14): it was behind when the run ended" in shown(tmp_path)


def test_what_waits_for_a_writer_that_does_not_start_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_supervisor, "RESTART_S", 600.0)
    model, optimizer, monitor = with_two_records(tmp_path)
    worker = monitor.cycle.worker
    sleeps = tmp_path / "sleeps"
    sleeps.write_text("#!/bin/sh\nexec sleep 300\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeps))
    os.kill(worker.process.pid, signal.SIGKILL)
    wait_for(lambda: worker.messages.mailbox._pipe < 0)
    observe(model, optimizer, monitor, 3)
    monitor.close()
    assert ("record", 3, 3, 5) in gap_lines(tmp_path)
    assert "after step 2 up to the last observed step, 5" in shown(tmp_path)
    threads = [each for each in threading.enumerate() if each.name == "distmon-writer-answers"]
    for pid in _children(str(sleeps), "sleep"):
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(60)


def _children(*programs: str) -> list[int]:
    """Return children of this process that run a program."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if int(stat[1]) == os.getpid() and words[0] in programs:
                found.append(int(entry.name))
    return found


def test_a_writer_that_makes_no_progress_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_supervisor, "STUCK_S", 0.0)
    model, optimizer, monitor = with_a_stopped_writer(tmp_path, monkeypatch)
    worker = monitor.cycle.worker
    mailbox = worker.messages.mailbox
    first, capacity = worker.process.pid, mailbox._capacity
    mailbox._capacity = 1  # no room for another one
    observe(model, optimizer, monitor, 2)
    mailbox._capacity = capacity
    wait_for(lambda: worker.process.pid != first and not worker.messages.absent)
    observe(model, optimizer, monitor, 1)
    assert written(tmp_path / "run", 5) == [1, 2, 5]
    monkeypatch.undo()
    monitor.close()
    assert "the writer process makes no progress; it is replaced" in caplog.text
    assert gap_lines(tmp_path) == [("record", 2, 3, 4)]
    assert "records.jsonl lacks 2 of 5 observations of attempt 0: after step 2" in shown(tmp_path)


def test_a_writer_that_did_not_start_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = os.memfd_create("test")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    before = len(os.listdir("/proc/self/fd"))
    for seconds in (60.0, 0.0):
        writer = writer_start.start_writer(memory, ())
        with pytest.raises(writer_start.WriterStartError):
            writer.wait_until_ready(seconds)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(memory)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_only_a_run_that_has_ended_is_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.undo()
    model, optimizer, monitor = attached(tmp_path, sinks=["jsonl"], writer=writer)
    observe(model, optimizer, monitor, 3)
    assert written(tmp_path / "run", 3) == [1, 2, 3]
    assert COMPLETE not in shown(tmp_path)
    monitor.close()
    ends = (tmp_path / "run" / "ends.jsonl").read_text().splitlines()
    (end,) = map(json.loads, ends)
    assert (end["attempt"], end["observations"], end["step"]) == (0, 3, 3)
    assert COMPLETE in shown(tmp_path)
    records = tmp_path / "run" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:2]))
    lacks = "records.jsonl lacks 1 of 3 observations of attempt 0: after step 2 up to the last"
    assert lacks in shown(tmp_path)
    (tmp_path / "run" / "ends.jsonl").unlink()
    assert COMPLETE not in shown(tmp_path)
    assert read_run(tmp_path / "run").problems == ()


def test_a_file_system_that_hangs_holds_neither_training_nor_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distmon.runs.run_folder import RunFolder

    hangs, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(gaps, "_appended", lambda *_: entered.set() or not hangs.wait())
    monkeypatch.setattr(gaps, "WRITE_S", 0.01)
    folder = RunFolder.open(tmp_path / "run", config=quiet(tmp_path), parameters=[])
    log = GapLog(folder)
    log.lost_step("writer", "record", 3, "it was behind")
    thread = threading.Thread(target=log.write, daemon=True)
    thread.start()
    assert entered.wait(60)
    log.lost_step("writer", "record", 4, "it was behind")  # as the training thread does
    log.end(LastObservation(4, 4))
    hangs.set()
    thread.join(60)


def test_sinks_in_the_training_process_close_on_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(gaps, "_appended", lambda *_: hangs.wait(60))
    for module in (gaps, delivery):
        monkeypatch.setattr(module, "WRITE_S", 0.01)
    model, optimizer, monitor = attached(tmp_path, sinks=["jsonl"], writer="thread")
    observe(model, optimizer, monitor, 2)
    closing = threading.Thread(target=monitor.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    hangs.set()

"""Storage that fails for a while: noticed at the next write, written again, gaps in the folder."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_run import MakeRecord

from distmon.config import MonitorConfig
from distmon.errors import ConfigError
from distmon.rules.alert import Alert
from distmon.runs.reader import read_run
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories, delivery, jsonl
from distmon.sinks.gaps import GapLog
from distmon.sinks.tensorboard import TensorBoardSink

CONFIG = MonitorConfig(sinks=("jsonl", "arrow"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "RETRY_S", 0.01)
    monkeypatch.setattr(delivery, "LONGEST_RETRY_S", 0.05)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    opened = RunFolder.open(tmp_path / "run", config={}, parameters=[])
    opened.begin_attempt(resumed_from=0, world_size=1)
    return opened


def delivering(folder: RunFolder) -> Delivery:
    return Delivery(build_factories(CONFIG, folder), 100, GapLog(folder))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def written(sinks: Delivery, count: int) -> Callable[[], bool]:
    return lambda: all(each["written"] >= count for each in sinks.stats().values())


def numbered(make_record: MakeRecord, number: int) -> Any:
    return replace(make_record(number), observation=number)


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_folder_that_vanishes_is_written_again(
    how: str, folder: RunFolder, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "distmon")
    sinks = delivering(folder)
    for number in (1, 2):
        sinks.post_record(numbered(make_record, number))
    wait_until(written(sinks, 2))
    if how == "removed":
        shutil.rmtree(folder.path)
    elif how == "renamed":
        folder.path.rename(folder.path.with_name("elsewhere"))
    else:
        for name in ("records.jsonl", "params.arrow"):
            (folder.path / name).unlink()
            (folder.path / name).touch()
    for number in (3, 4):
        sinks.post_record(numbered(make_record, number))
    stats = sinks.close(30)
    assert stats["jsonl"] == {"written": 4, "failed": 0, "dropped": 0}
    run = read_run(folder.path)
    assert [record["step"] for record in run.records] == [3, 4]
    assert sorted({*run.params["step"].to_pylist()}) == [3, 4]
    # What somebody removed is missing, and the folder does not pretend otherwise.
    assert any("lacks 2 of 4 observations" in problem for problem in run.problems)
    named = [m for m in caplog.messages if '"jsonl" cannot write' in m]
    assert len(named) == 1
    assert any('"jsonl" works again' in m for m in caplog.messages)


def test_items_wait_while_the_disk_is_full(
    folder: RunFolder, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, tried = threading.Event(), threading.Event()
    append = jsonl.append_atomically

    def sometimes(descriptor: int, data: bytes) -> None:
        if full.is_set():
            tried.set()
            raise OSError(28, "No space left on device")
        append(descriptor, data)

    monkeypatch.setattr(jsonl, "append_atomically", sometimes)
    sinks = delivering(folder)
    sinks.post_record(numbered(make_record, 1))
    wait_until(written(sinks, 1))
    full.set()
    for number in (2, 3, 4):
        sinks.post_record(numbered(make_record, number))
    assert tried.wait(30)
    full.clear()
    assert sinks.close(30)["jsonl"] == {"written": 4, "failed": 0, "dropped": 0}
    run = read_run(folder.path)
    assert [record["step"] for record in run.records] == [1, 2, 3, 4]
    assert run.problems == ()


def test_what_is_lost_is_counted_in_the_folder(
    folder: RunFolder, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonl, "append_atomically", never)
    sinks = delivering(folder)
    for number in (1, 2):
        sinks.post_record(numbered(make_record, number))
    sinks.post_alert(Alert("frozen", "warning", 2, "it is frozen"))
    wait_until(lambda: sinks.stats()["arrow"]["written"] == 3)
    assert sinks.close(30)["jsonl"] == {"written": 0, "failed": 3, "dropped": 0}
    gaps = [json.loads(line) for line in folder.gaps_path.read_text().splitlines()]
    assert [(g["sink"], g["what"], g["count"], g["step"], g["last_step"]) for g in gaps] == [
        ("jsonl", "record", 2, 1, 2),
        ("jsonl", "alert", 1, 2, 2),
    ]
    problems = read_run(folder.path).problems
    assert "the sink jsonl lost 2 records (steps 1 to 2): OSError" in problems


def test_a_sink_that_could_not_be_opened_is_tried_again(
    folder: RunFolder, make_record: MakeRecord
) -> None:
    usable = threading.Event()
    made = dict(build_factories(CONFIG, folder))["jsonl"]
    tries: list[int] = []

    def factory() -> Any:
        tries.append(1)
        if not usable.is_set():
            raise RuntimeError("no login")
        return made()

    sinks = Delivery([("web", factory)], 10, GapLog(folder))
    for number in (1, 2):
        sinks.post_record(numbered(make_record, number))
    wait_until(lambda: len(tries) > 2)
    usable.set()
    assert sinks.close(30)["web"] == {"written": 2, "failed": 0, "dropped": 0}


def test_a_sink_without_its_package_is_disabled(make_record: MakeRecord) -> None:
    tries: list[int] = []

    def factory() -> Any:
        tries.append(1)
        raise ConfigError("needs a package")

    sinks = Delivery([("web", factory)], 10)
    for number in (1, 2):
        sinks.post_record(make_record(number))
    assert sinks.close(30)["web"] == {"written": 0, "failed": 2, "dropped": 0}
    assert tries == [1]


def test_a_queue_is_bounded_in_bytes(
    folder: RunFolder, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Slow:
        def record(self, record: Any) -> None:  # noqa: ARG002
            release.wait()

        alert = record

        def close(self) -> None: ...

    record = make_record(1)
    monkeypatch.setattr(delivery, "MOST_BYTES", int(3.5 * delivery._size(record)))
    sinks = Delivery([("slow", Slow)], 100, GapLog(folder))
    for _ in range(10):
        sinks.post_record(record)
    assert sinks.stats()["slow"]["dropped"] >= 6
    release.set()
    sinks.close(30)
    assert "it was behind" in folder.gaps_path.read_text()


def test_a_read_only_folder_is_written_again(folder: RunFolder, make_record: MakeRecord) -> None:
    if os.geteuid() == 0:
        # root may write anywhere: a directory in the place of the file is as unwritable
        folder.records_path.mkdir()
    else:
        folder.path.chmod(0o500)
    sinks = delivering(folder)
    sinks.post_record(numbered(make_record, 1))
    with contextlib.suppress(OSError):  # the sink may have put it aside already
        folder.records_path.rmdir()
    folder.path.chmod(0o700)
    sinks.post_record(numbered(make_record, 2))
    assert sinks.close(30)["jsonl"]["written"] == 2
    assert [record["step"] for record in read_run(folder.path).records] == [1, 2]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_event_files_are_written_again(
    what: str, folder: RunFolder, make_record: MakeRecord, capfd: pytest.CaptureFixture[str]
) -> None:
    config = MonitorConfig(sinks=("tensorboard",))
    sinks = Delivery(build_factories(config, folder), 100, GapLog(folder))
    for number in (1, 2):
        sinks.post_record(numbered(make_record, number))
    wait_until(written(sinks, 2))
    (file,) = folder.tensorboard_path.iterdir()
    if what == "folder":
        folder.path.rename(folder.path.with_name("elsewhere"))
    else:
        file.unlink()
        file.mkdir()
    for number in (3, 4):
        sinks.post_record(numbered(make_record, number))
    assert sinks.close(30)["tensorboard"] == {"written": 4, "failed": 0, "dropped": 0}
    assert event_steps(folder.tensorboard_path) == {3, 4}
    assert "Traceback" not in capfd.readouterr().err


def test_an_event_file_that_is_opened_again_hides_nothing_of_its_attempt(
    folder: RunFolder, make_record: MakeRecord
) -> None:
    resumed = RunFolder.open(folder.path, config={}, parameters=[])
    resumed.begin_attempt(resumed_from=0, world_size=1)
    for number in (1, 2):
        sink = TensorBoardSink(resumed, frozenset())
        sink.record(numbered(make_record, number))
        sink.close()
    found = [*event_purges(resumed.tensorboard_path)]
    assert len(found) == 1
    assert len([*resumed.tensorboard_path.iterdir()]) == 2


def event_purges(folder: Path) -> Iterator[int]:
    """Yield the steps from which TensorBoard hides earlier events."""
    yield from (event.step for event in _events(folder) if event.HasField("session_log"))


def event_steps(folder: Path) -> set[int]:
    """Return the steps with the gradient norm."""
    return {
        event.step
        for event in _events(folder)
        for value in event.summary.value
        if value.tag == "monitor/grad_norm"
    }


def _events(folder: Path) -> Iterator[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for file in sorted(filter(Path.is_file, folder.iterdir())):
        yield from LegacyEventFileLoader(str(file)).Load()


@pytest.mark.parametrize("what", ["folder", "link", "pipe", "nothing", "garbage", "half"])
@pytest.mark.parametrize("name", ["records.jsonl", "alerts.jsonl", "params.arrow", "run.json"])
def test_one_bad_file_does_not_stop_the_others(
    name: str, what: str, folder: RunFolder, make_record: MakeRecord
) -> None:
    sinks = delivering(folder)
    for number in (1, 2):
        sinks.post_record(numbered(make_record, number))
    sinks.post_alert(Alert("frozen", "warning", 2, "it is frozen"))
    wait_until(written(sinks, 3))
    damage(folder.path / name, what)
    for number in (3, 4):
        sinks.post_record(numbered(make_record, number))
    sinks.post_alert(Alert("frozen", "warning", 4, "it is frozen"))
    assert all(not each["failed"] + each["dropped"] for each in sinks.close(60).values())
    run = read_run(folder.path)
    assert {3, 4} <= {record["step"] for record in run.records}
    assert {4} <= {alert["step"] for alert in run.alerts}
    assert {3, 4} <= {*run.params["step"].to_pylist()}
    if name != "records.jsonl":
        assert [record["step"] for record in run.records] == [1, 2, 3, 4]


def damage(file: Path, what: str) -> None:
    content = file.read_bytes()
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "link":
        file.symlink_to("/dev/null")
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "garbage":
        file.write_bytes(b"\xff{" * 3000)
    elif what == "half":
        file.write_bytes(content[: len(content) // 2])

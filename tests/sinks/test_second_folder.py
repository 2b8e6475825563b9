"""`spool_dir`: entries wait in a second folder while the run folder cannot be written."""

from __future__ import annotations

import ctypes
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_run import MakeRecord

from distmon.config import MonitorConfig
from distmon.rules.alert import Alert
from distmon.runs.open_run import open_run
from distmon.runs.reader import read_run
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories, delivery, second_folder
from distmon.sinks.gaps import GapLog

CONFIG = MonitorConfig(sinks=("jsonl", "arrow"))
DESCRIBED: dict[str, Any] = {"config": {}, "parameters": []}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_folder, "RETRY_S", 0.0)
    monkeypatch.setattr(delivery, "RETRY_S", 0.01)
    monkeypatch.setattr(delivery, "LONGEST_RETRY_S", 0.05)


AT_FDCWD, RENAME_EXCHANGE = -100, 2


def opened(tmp_path: Path) -> RunFolder:
    folder = open_run(tmp_path / "run", False, DESCRIBED, tmp_path / "spool")
    folder.begin_attempt(resumed_from=0, world_size=1)
    return folder


def deliver(folder: RunFolder, make_record: MakeRecord, *numbers: int) -> None:
    sinks = Delivery(build_factories(CONFIG, folder), 2, GapLog(folder))
    for number in numbers:
        sinks.post_record(replace(make_record(number), observation=number))
        sinks.post_alert(Alert("frozen", "warning", number, "it is frozen"))
    assert all(not each["dropped"] + each["failed"] for each in sinks.close(60).values())


def make_unusable(folder: RunFolder) -> None:
    folder.path.rename(folder.path.with_name("away"))
    folder.path.touch()


def make_usable(folder: RunFolder) -> None:
    # At once: a sink that tries again in between would make a folder of its own there.
    away = folder.path.with_name("away")
    exchange = ctypes.CDLL(None, use_errno=True).renameat2
    if exchange(AT_FDCWD, bytes(folder.path), AT_FDCWD, bytes(away), RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "cannot exchange the folders")
    away.unlink()


def steps(path: Path) -> tuple[list[int], list[int], list[int]]:
    run = read_run(path)
    return (
        [record["step"] for record in run.records],
        [alert["step"] for alert in run.alerts],
        sorted({*run.params["step"].to_pylist()}),
    )


def test_entries_wait_in_the_second_folder_and_are_moved_back(
    tmp_path: Path, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "distmon")
    folder = opened(tmp_path)
    deliver(folder, make_record, 1, 2)
    assert not (tmp_path / "spool").exists()  # nothing is made that is not needed
    make_unusable(folder)
    deliver(folder, make_record, 3, 4)
    assert folder.second is not None
    assert steps(folder.second) == ([3, 4],) * 3
    assert f"what it could not write is in {folder.second}" in caplog.text
    make_usable(folder)
    assert steps(folder.path) == ([1, 2],) * 3
    deliver(folder, make_record, 5)
    assert steps(folder.path) == ([1, 2, 3, 4, 5],) * 3
    assert read_run(folder.path).problems == ()
    assert not folder.second.exists()
    assert "works again; 4 entries were moved" in caplog.text
    folder.release()


def test_the_run_folder_is_tried_again_while_the_sink_is_open(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    folder = opened(tmp_path)
    make = dict(build_factories(CONFIG, folder))
    for name in ("jsonl", "arrow"):
        sink = make[name]()
        sink.record(make_record(1))
        make_unusable(folder)
        sink.record(make_record(2))
        make_usable(folder)
        sink.record(make_record(3))
        sink.close()
    assert read_run(folder.path).params["step"].unique().to_pylist() == [1, 2, 3]
    assert [record["step"] for record in read_run(folder.path).records] == [1, 2, 3]
    folder.release()


def test_what_was_moved_before_a_crash_is_not_moved_again(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    folder = opened(tmp_path)
    make_unusable(folder)
    deliver(folder, make_record, 1, 2)
    make_usable(folder)
    assert folder.second is not None
    first = (folder.second / "records.jsonl").read_bytes().splitlines(keepends=True)[0]
    with (folder.path / "records.jsonl").open("ab") as file:
        file.write(first)
    deliver(folder, make_record, 3)
    assert steps(folder.path)[0] == [1, 2, 3]
    folder.release()


def test_neither_folder_can_be_written(tmp_path: Path, make_record: MakeRecord) -> None:
    folder = opened(tmp_path)
    make_unusable(folder)
    (tmp_path / "spool").touch()
    sinks = Delivery(build_factories(CONFIG, folder), 2, GapLog(folder))
    for number in (1, 2, 3):
        sinks.post_record(replace(make_record(number), observation=number))
    (tmp_path / "spool").unlink()
    assert sinks.close(60)["jsonl"] == {"written": 3, "failed": 0, "dropped": 0}
    assert folder.second is not None
    assert steps(folder.second)[0] == [1, 2, 3]
    folder.release()


def test_a_full_second_folder_keeps_entries_in_memory(
    tmp_path: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_folder, "MOST_BYTES", 10)
    folder = opened(tmp_path)
    make_unusable(folder)
    sinks = Delivery(build_factories(CONFIG, folder), 2, GapLog(folder))
    for number in range(1, 6):
        sinks.post_record(replace(make_record(number), observation=number))
    make_usable(folder)
    assert sinks.close(60)["jsonl"] == {"written": 5, "failed": 0, "dropped": 0}
    assert steps(folder.path)[0] == [1, 2, 3, 4, 5]
    folder.release()


def test_gaps_wait_there_too(tmp_path: Path, make_record: MakeRecord) -> None:
    folder = opened(tmp_path)
    make_unusable(folder)
    deliver(folder, make_record, 1)
    gaps = GapLog(folder)
    gaps.lost_step("wandb", "record", 7, "it was behind")
    gaps.write()
    make_usable(folder)
    deliver(folder, make_record, 2)
    lines = (folder.path / "gaps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [7]
    folder.release()


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    make_unusable(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    make = dict(build_factories(CONFIG, folder))
    with pytest.raises(OSError, match="belongs to another user"):
        make["jsonl"]()
    folder.release()


def test_an_unusable_run_folder_is_replaced_in_the_spool_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    folder = open_run(tmp_path / "run", False, DESCRIBED, tmp_path / "spool")
    assert folder.path.parent == tmp_path / "spool"
    folder.release()

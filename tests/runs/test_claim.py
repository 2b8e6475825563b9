"""One process writes to a run folder; a second run gets its own, and a dead claim is taken over."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distmon.errors import RunFolderError
from distmon.runs import claim as claim_module
from distmon.runs import open_run as open_run_module
from distmon.runs.claim import CLAIM_FILE, Claim, Owner, claim
from distmon.runs.entries import FORMAT
from distmon.runs.open_run import open_run
from distmon.runs.reader import read_run
from distmon.runs.run_folder import RunFolder

DESCRIBED = {"config": {}, "parameters": []}
CHILD = (
    "from distmon.runs.claim import *; print(type(claim(Path({!r}))).__name__, flush=True); input()"
)


def write_claim(folder: Path, owner: Owner, age: float = 0.0) -> None:
    path = folder / CLAIM_FILE
    path.write_text(json.dumps(asdict(owner)))
    then = time.time() - age
    os.utime(path, (then, then))


def test_a_second_run_gets_a_folder_of_its_own_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tmp_path / "run"
    with caplog.at_level(logging.WARNING, "distmon"):
        folders = [open_run(wanted, False, DESCRIBED) for _ in range(3)]
    assert [folder.path.name for folder in folders] == ["run", "run-2", "run-3"]
    assert [folder.attempt for folder in folders] == [0, 0, 0]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == (
        f"distmon: {wanted} is in use by process {os.getpid()} on {Owner.this_process().host}; "
        f"writing this run to {wanted}-2"
    )
    folders[0].begin_attempt(resumed_from=0, world_size=1)
    for folder in folders:
        folder.release()
        folder.release()
    again = open_run(wanted, False, DESCRIBED)
    assert (again.path, again.attempt) == (wanted, 1)
    again.release()
    assert not (wanted / CLAIM_FILE).exists()


def test_the_claim_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(str(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "Claim\n"
    holder = claim(tmp_path)
    assert isinstance(holder, Owner)
    assert holder.pid == child.pid
    child.kill()
    child.communicate()
    own = claim(tmp_path)
    assert isinstance(own, Claim)
    own.release()


def test_another_machine_is_known_by_its_heartbeat(tmp_path: Path) -> None:
    elsewhere = replace(Owner.this_process(), host="elsewhere", boot="other", token="x")
    write_claim(tmp_path, elsewhere, age=20)
    assert claim(tmp_path) == elsewhere
    write_claim(tmp_path, elsewhere, age=90)
    taken = claim(tmp_path)
    assert isinstance(taken, Claim)
    taken.release()


def test_the_clock_of_this_machine_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = replace(Owner.this_process(), host="elsewhere", boot="other", token="x")
    write_claim(tmp_path, elsewhere, age=20)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert claim(tmp_path) == elsewhere


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "an earlier boot"},
        {"started": "12"},
        {"pid": 2**22 + 1},
        {"job": "job-1", "restarts": 0, "host": "elsewhere"},
    ],
)
def test_dead_claims(tmp_path: Path, change: dict[str, object]) -> None:
    """Before a reboot, of an earlier process of this number, of none, before a restart."""
    own = Owner.this_process({"TORCHELASTIC_RUN_ID": "job-1", "TORCHELASTIC_RESTART_COUNT": "1"})
    write_claim(tmp_path, replace(own, token="x", **change))  # type: ignore[arg-type]
    taken = claim(tmp_path, own)
    assert isinstance(taken, Claim)
    taken.release()


@pytest.mark.parametrize("content", ["", "{", '{"host": 1}', "[]", '{"host":"a","pid":"1"}'])
def test_a_claim_that_nobody_understands_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / CLAIM_FILE).write_text(content)
    taken = claim(tmp_path)
    assert isinstance(taken, Claim)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CLAIM_FILE]
    taken.release()


def test_a_claim_stays_with_its_process(tmp_path: Path) -> None:
    folder = open_run(tmp_path / "run", False, DESCRIBED)
    assert pickle.loads(pickle.dumps(folder.claim)) is None
    if os.fork() == 0:
        folder.release()
        os._exit(0)
    os.wait()
    assert (folder.path / CLAIM_FILE).exists()
    folder.release()


def test_a_newer_format_is_refused_and_an_older_one_read(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, config={}, parameters=[])
    file = tmp_path / "run.json"
    content = json.loads(file.read_text())
    assert content["format"] == FORMAT
    file.write_text(json.dumps(content | {"format": FORMAT + 1}))
    with pytest.raises(RunFolderError, match=r"newer version of distmon \(format 3; .* up to 2\)"):
        read_run(tmp_path)
    del content["format"]  # as 0.1.0 wrote it
    file.write_text(json.dumps(content))
    assert read_run(tmp_path).problems == ()


def test_a_folder_that_does_not_answer_is_replaced_and_given_up_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    check = open_run_module.check_writable

    def slow(folder: Path) -> None:
        if folder == tmp_path / "run":
            answers.wait()
        check(folder)

    monkeypatch.setattr(open_run_module, "check_writable", slow)
    monkeypatch.setattr(open_run_module, "OPEN_S", 0.2)
    folder = open_run(tmp_path / "run", False, DESCRIBED, tmp_path / "spool")
    assert folder.path.parent == tmp_path / "spool"
    assert "did not answer within 0.2 s" in caplog.text
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "distmon-open-run":
            thread.join(60)
    assert (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "run" / ".claim").exists()
    folder.release()


def test_a_folder_that_was_replaced_is_claimed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "PERIOD_S", 0.02)
    folder = open_run(tmp_path / "run", False, DESCRIBED)
    folder.path.rename(tmp_path / "elsewhere")
    folder.path.mkdir()
    deadline = time.monotonic() + 60
    while not (folder.path / ".claim").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = open_run(tmp_path / "run", False, DESCRIBED)
    assert other.path == tmp_path / "run-2"
    other.release()
    folder.release()
    assert not (folder.path / ".claim").exists()


def test_a_file_system_that_hangs_does_not_hold_the_process_that_gives_a_folder_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "RELEASE_S", 0.05)
    folder = RunFolder.open(tmp_path / "run", config={}, parameters=[])
    hangs = threading.Event()
    monkeypatch.setattr(claim_module, "_read", lambda _: hangs.wait(60) and None)
    releasing = threading.Thread(target=folder.release, daemon=True)
    releasing.start()
    releasing.join(30)
    assert not releasing.is_alive()
    hangs.set()

from __future__ import annotations

import json
import pickle
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from distmon.errors import RunFolderError
from distmon.runs import run_folder
from distmon.runs.open_run import open_run
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_json import read_info, strict_json

TABLE = [{"name": "w", "shape": [2], "dtype": "float32", "requires_grad": True, "sampled": 2}]


def start(path: Path) -> RunFolder:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return RunFolder.open(path, config={"seed": 1}, parameters=TABLE, now=lambda: moment)


def test_a_new_folder_is_recognisable_before_the_first_step(tmp_path: Path) -> None:
    folder = start(tmp_path / "a" / "b")
    info = json.loads((folder.path / "run.json").read_text())
    assert info["attempts"] == []
    assert info["config"] == {"seed": 1}
    assert info["parameters"] == TABLE
    assert {"distmon", "torch", "python"} <= set(info["versions"])
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


def test_attempts_are_numbered_and_kept(tmp_path: Path) -> None:
    start(tmp_path).begin_attempt(resumed_from=0, world_size=2)
    start(tmp_path)  # died before its first step: no attempt
    second = start(tmp_path)
    second.keep_wandb_id("abc")
    second.begin_attempt(resumed_from=40, world_size=4)
    info = json.loads((tmp_path / "run.json").read_text())
    started = "2026-01-02T03:04:05+00:00"
    assert info["attempts"] == [
        {"attempt": 0, "resumed_from": 0, "started": started, "world_size": 2},
        {"attempt": 1, "resumed_from": 40, "started": started, "world_size": 4},
    ]
    assert start(tmp_path).wandb_id == "abc"
    with pytest.raises(RunFolderError, match="already begun"):
        second.begin_attempt(resumed_from=40, world_size=4)


@pytest.mark.parametrize("has_begun", [True, False])
def test_another_process_continues_the_attempt(tmp_path: Path, has_begun: bool) -> None:
    start(tmp_path).begin_attempt(resumed_from=0, world_size=2)
    training = start(tmp_path)
    writer: RunFolder = pickle.loads(pickle.dumps(training))
    training.note_attempt(resumed_from=30, world_size=2)
    training.note_attempt(resumed_from=40, world_size=2)  # again, since it did not reach a writer
    if has_begun:
        writer.begin_attempt(resumed_from=40, world_size=2)
        writer.keep_wandb_id("abc")
    following: RunFolder = pickle.loads(pickle.dumps(training))
    following.continue_attempt()
    assert following.wandb_id == ("abc" if has_begun else None)
    following.keep_wandb_id("abc")
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["wandb_id"] == "abc"
    assert [(each["attempt"], each["resumed_from"]) for each in info["attempts"]] == [
        (0, 0),
        (1, 40),
    ]


def test_an_attempt_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = start(tmp_path)
    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(RunFolderError, match="No space"):
        folder.begin_attempt(resumed_from=0, world_size=2)
    monkeypatch.undo()
    folder.restore()
    assert len(json.loads((tmp_path / "run.json").read_text())["attempts"]) == 1


@pytest.mark.parametrize("below", ["", "below/deeper"])
def test_a_path_that_cannot_be_written_is_refused_at_open(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / below
    with pytest.raises(RunFolderError) as caught:
        start(target)
    assert str(target) in str(caught.value)
    assert "expected a directory that can be created and written" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_system_without_writing_is_refused_at_open() -> None:
    with pytest.raises(RunFolderError, match="cannot write the run folder /proc/runs"):
        start(Path("/proc/runs"))


@pytest.mark.parametrize("content", ["{", "", "[]", '{"attempts": 3}', '{"attempts": [{}]}'])
def test_a_broken_run_file_is_named_and_not_touched(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json"):
        start(tmp_path)
    assert (tmp_path / "run.json").read_text() == content
    assert len(list(tmp_path.iterdir())) == 1


def test_strict_json_has_no_nan() -> None:
    text = strict_json({"a": [float("nan"), float("-inf"), 1.5], 3: Path("x"), "t": (True, None)})
    assert text == '{"a": [null, null, 1.5], "3": "x", "t": [true, null]}'


def test_a_run_without_any_folder_to_write_to_begins_and_writes_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    (tmp_path / "run").write_text("a file")
    described = {"config": {}, "parameters": [], "reading": {}}
    folder = open_run(tmp_path / "run", strict=False, described=described)
    assert "trying again later" in caplog.text
    folder.note_attempt(resumed_from=0, world_size=1)
    (tmp_path / "run").unlink()
    folder.restore()
    assert [entry["attempt"] for entry in read_info(tmp_path / "run")["attempts"]] == [0]
    with pytest.raises(RunFolderError):
        open_run(Path("/proc/nothing"), strict=True, described=described)

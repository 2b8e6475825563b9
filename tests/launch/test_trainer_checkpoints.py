"""Checkpoints: what stays on disk, which one is the latest, and which are refused."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from launch.checkpoint import Checkpoints, read_checkpoint
from launch.model import GPT, Shape
from launch.ranks import BadInput

SHAPE = Shape(layers=1, width=16, heads=2, context=8)


def content(shape: Shape = SHAPE) -> dict[str, object]:
    model = GPT(shape)
    state = {"model": model.state_dict(), "optimizer": {}}
    return {**state, "shape": asdict(shape), "monitor": {"step": 3}}


def test_older_ones_go_but_not_those_of_earlier_runs(tmp_path: Path) -> None:
    earlier = tmp_path / "step-000900.pt"
    earlier.write_bytes(b"old")
    saver = Checkpoints(tmp_path, keep=1)
    for step in (10, 20, 30):
        saver.save(step, content())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000020.pt",
        "step-000030.pt",
        "step-000900.pt",
    ]


def test_latest_is_the_last_written(tmp_path: Path) -> None:
    saver = Checkpoints(tmp_path, keep=5)
    long_run, short_run = saver.save(900, content()), saver.save(20, content())
    os.utime(long_run, (1, 1))
    (tmp_path / "step-000999.partial-1").touch()
    assert saver.find("latest") == short_run
    assert read_checkpoint(short_run, SHAPE)["monitor"] == {"step": 3}


def test_checkpoints_of_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({**content(), "step": 5}, path)
    with pytest.raises(BadInput, match=r"old\.pt was written by another version of this trainer"):
        read_checkpoint(path, SHAPE)


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=0).save(5, {**content(), "algorithm": "sgd"})
    assert read_checkpoint(path, SHAPE, "sgd")["step"] == 5
    with pytest.raises(BadInput, match="was trained with --optimizer sgd, not adamw"):
        read_checkpoint(path, SHAPE, "adamw")
    with pytest.raises(BadInput, match="dtype float32 there, bfloat16 here"):
        read_checkpoint(path, replace(SHAPE, dtype="bfloat16"), "sgd")


def test_older_checkpoints_are_of_the_model_that_there_was_then(tmp_path: Path) -> None:
    older = {key: asdict(SHAPE)[key] for key in ("layers", "width", "heads", "context", "tied")}
    path = Checkpoints(tmp_path, keep=0).save(5, {**content(), "shape": older})
    assert read_checkpoint(path, SHAPE)["step"] == 5
    with pytest.raises(BadInput, match="activation gelu there, relu here"):
        read_checkpoint(path, replace(SHAPE, activation="relu"))


def test_truncated_or_other_checkpoints_are_refused(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=0).save(5, content())
    with pytest.raises(BadInput, match="another model: layers 1 there, 2 here, tied False there"):
        read_checkpoint(path, Shape(layers=2, width=16, heads=2, context=8, tied=True))
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput, match=r"step-000005\.pt is damaged or is not a checkpoint"):
            read_checkpoint(path, SHAPE)


def test_unwritable_folder_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    saver = Checkpoints(blocker / "folder", keep=0)
    with pytest.raises(BadInput, match=r"cannot write checkpoints to .*folder: Not a directory"):
        saver.open()
    with pytest.raises(BadInput, match=r"cannot write the checkpoint .*step-000001\.pt: "):
        saver.save(1, content())


def test_interrupted_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Checkpoints(tmp_path, keep=0)
    before = saver.save(1, content()).read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(BadInput, match="No space left on device"):
        saver.save(1, content())
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]

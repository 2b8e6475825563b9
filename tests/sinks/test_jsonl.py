from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sample_run import MakeRecord, OpenFolder

from distmon.record.record import Evaluation, GainTable
from distmon.reduce.findings import Desync, NonFinite, NonFinitePlace
from distmon.rules.alert import Alert
from distmon.sinks.atomic_append import append_atomically
from distmon.sinks.jsonl import JsonlSink
from distmon.untrusted.files import open_for_append


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_record_is_one_strict_line(make_record: MakeRecord, open_folder: OpenFolder) -> None:
    folder = open_folder()
    place = NonFinitePlace("w", 1, 0, 0, 2, 0)
    record = make_record(
        20,
        metrics={"train/step_loss": float("nan"), "x": np.float32(1.5), "y": float("inf")},
        losses={20: float("nan"), 19: 1.0},
        loss_ema={19: 1.25},
        ranks={"step_seconds": np.array([0.5, np.nan])},
        nonfinite=NonFinite(20, "loss", (place,), 1),
        desync=Desync((1,), 0, ("w",), tie=False),
        faults=("rank 1 failed",),
        applied=False,
        gradient_gain=GainTable(("blocks.0",), np.array([2.0]), np.array([np.nan])),
        evaluations=(Evaluation(1, 20, None, 2.0, 3.0, None, None, 0.5, 0),),
        tasks={"pointer": 1.5},
    )
    sink = JsonlSink(folder, clock=lambda: 7.0)
    sink.record(record)
    sink.alert(Alert("nan", "critical", 20, "NaN", params=("w",), measured=float("nan")))
    sink.close()

    text = folder.records_path.read_text()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert strict(text) == {
        "step": 20,
        "observation": 0,
        "time": 1.7e9 + 20,
        "attempt": 0,
        "world_size": 2,
        "applied": False,
        "partial": False,
        "metrics": {"train/step_loss": None, "x": 1.5, "y": None},
        "mfu_source": "",
        "loss_steps": [19, 20],
        "loss_values": [1.0, None],
        "loss_ema": [1.25, None],
        "ranks": {"step_seconds": [0.5, None]},
        "flow": {"blocks": ["blocks.0"], "input_norm": [2.0], "output_norm": [None]},
        "evaluations": [
            {
                "number": 1,
                "step": 20,
                "epoch": None,
                "train_loss": 2.0,
                "val_loss": 3.0,
                "improvement": None,
                "train_improvement": None,
                "gap": 0.5,
                "unchanged": 0,
            }
        ],
        "tasks": {"pointer": 1.5},
        "nonfinite": {
            "step": 20,
            "signal": "loss",
            "places": [
                {
                    "param": "w",
                    "rank": 1,
                    "weight_nan": 0,
                    "weight_inf": 0,
                    "grad_nan": 2,
                    "grad_inf": 0,
                }
            ],
            "param_count": 1,
            "counted_at": 0,
        },
        "desync": {"ranks": [1], "reference": 0, "params": ["w"], "tie": False},
        "faults": ["rank 1 failed"],
    }
    alert = strict(folder.alerts_path.read_text())
    assert alert["rule"] == "nan"
    assert alert["measured"] is None
    assert (alert["attempt"], alert["time"]) == (0, 7.0)


def test_a_line_cut_by_a_crash_stays_alone(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    first = open_folder()
    sink = JsonlSink(first)
    sink.record(make_record(10))
    sink.record(make_record(20))
    sink.close()
    whole = first.records_path.read_bytes()
    first.records_path.write_bytes(whole[:-30])

    sink = JsonlSink(open_folder(resumed_from=10))
    sink.record(replace(make_record(20), world_size=5))
    sink.close()
    lines = first.records_path.read_text().splitlines()
    assert len(lines) == 3
    assert strict(lines[0])["step"] == 10
    assert (strict(lines[2])["world_size"], strict(lines[2])["attempt"]) == (5, 1)


def test_each_line_is_one_write(
    make_record: MakeRecord, open_folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    real = os.write
    sink = JsonlSink(open_folder())
    monkeypatch.setattr(os, "write", lambda fd, data: (written.append(data), real(fd, data))[1])
    sink.record(make_record(1))
    sink.record(make_record(2))
    assert [data.count(b"\n") for data in written] == [1, 1]
    assert all(data.endswith(b"}\n") for data in written)


def test_a_full_disk_leaves_no_half_entry(
    open_folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = open_folder().path / "f"
    descriptor = open_for_append(path)
    append_atomically(descriptor, b"one\n")
    real, calls = os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data[:2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append_atomically(descriptor, b"two\n")
    monkeypatch.undo()
    append_atomically(descriptor, b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def open_files() -> set[str]:
    return {*os.listdir("/proc/self/fd")}


def test_files_that_cannot_be_synced_are_closed(
    open_folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = open_folder(), open_files()
    sink = JsonlSink(folder)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        sink.close()
    assert open_files() == before


def test_files_that_cannot_be_opened_leave_none_open(
    open_folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = open_folder(), open_files()
    folder.alerts_path.write_text('{"cut')
    monkeypatch.setattr(os, "write", no_space)
    with pytest.raises(OSError, match="No space"):
        JsonlSink(folder)
    assert open_files() == before

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from distmon.errors import RunFolderError
from distmon.record.record import ParamTable, Record
from distmon.rules.alert import Alert
from distmon.runs import file_tails
from distmon.runs.file_tails import LineTail
from distmon.runs.reader import read_run
from distmon.runs.run_folder import RunFolder
from distmon.sinks.arrow import ArrowSink
from distmon.sinks.jsonl import JsonlSink


def attempt(path: Path, resumed_from: int, steps: range, loss: float = 1.0) -> RunFolder:
    """Run one attempt that observes `steps` and alerts at each of them."""
    folder = RunFolder.open(path, config={}, parameters=[])
    folder.begin_attempt(resumed_from=resumed_from, world_size=1)
    lines, history = JsonlSink(folder), ArrowSink(folder)
    before = resumed_from
    for step in steps:
        record = Record(
            step=step,
            time=0.0,
            world_size=1,
            metrics={"train/step_loss": loss},
            params=ParamTable(("w", "b"), {"weight_norm": np.array([loss, 0.0])}),
            ranks={},
            losses=dict.fromkeys(range(before + 1, step + 1), loss),
            loss_ema=dict.fromkeys(range(before + 1, step + 1), loss / 2),
        )
        before = step
        lines.record(record)
        lines.alert(Alert("rule", "info", step, "text"))
        history.record(record)
    lines.close()
    history.close()
    return folder


def test_one_attempt_reads_back(tmp_path: Path) -> None:
    attempt(tmp_path, 0, range(10, 31, 10), float("nan"))
    run = read_run(tmp_path)
    assert run.problems == ()
    assert run.info["attempts"][0]["resumed_from"] == 0
    assert [record["step"] for record in run.records] == [10, 20, 30]
    assert math.isnan(run.records[0]["metrics"]["train/step_loss"])
    assert math.isnan(run.records[0]["loss_values"][0])
    assert [alert["step"] for alert in run.alerts] == [10, 20, 30]
    frame = run.params.to_pandas()
    assert list(frame["step"]) == [10, 10, 20, 20, 30, 30]
    assert list(frame["name"]) == ["w", "b"] * 3
    assert list(run.losses) == list(range(1, 31))


def test_three_attempts_leave_the_branch_that_counts(tmp_path: Path) -> None:
    attempt(tmp_path, 0, range(10, 51, 10), 1.0)
    attempt(tmp_path, 40, range(50, 81, 10), 2.0)
    attempt(tmp_path, 25, range(30, 61, 10), 3.0)
    run = read_run(tmp_path)
    expected = [(10, 0), (20, 0), (30, 2), (40, 2), (50, 2), (60, 2)]
    assert [(entry["step"], entry["attempt"]) for entry in run.records] == expected
    assert [(entry["step"], entry["attempt"]) for entry in run.alerts] == expected
    rows = zip(run.params["step"].to_pylist(), run.params["attempt"].to_pylist(), strict=True)
    assert list(dict.fromkeys(rows)) == expected
    # Steps 21 to 25 were only in the record of step 30 that the third attempt replaced.
    assert list(run.losses) == list(range(1, 61))
    assert [run.losses[step] for step in (20, 21, 25, 26, 60)] == [1, 1, 1, 3, 3]
    assert run.loss_ema[25] == 0.5

    everything = read_run(tmp_path, all_attempts=True)
    assert len(everything.records) == len(everything.alerts) == 5 + 4 + 4
    assert everything.params.num_rows == 26
    steps = [(entry["step"], entry["attempt"]) for entry in everything.records]
    assert steps == sorted(steps)
    assert everything.losses[80] == 2.0
    assert everything.losses[50] == 3.0


def test_a_straight_continuation_replaces_nothing(tmp_path: Path) -> None:
    attempt(tmp_path, 0, range(10, 31, 10))
    attempt(tmp_path, 30, range(40, 51, 10))
    assert [record["step"] for record in read_run(tmp_path).records] == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("name", ["records.jsonl", "alerts.jsonl"])
def test_a_line_cut_anywhere_is_dropped_and_named(tmp_path: Path, name: str) -> None:
    attempt(tmp_path, 0, range(10, 31, 10))
    path = tmp_path / name
    content = path.read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    for cut in range(start, len(content) - 1, 7):
        path.write_bytes(content[:cut])
        run = read_run(tmp_path)
        found = run.records if name.startswith("records") else run.alerts
        assert [entry["step"] for entry in found] == [10, 20]
        lost = cut - start
        sentence = f"{name} ends in the middle of line 3: its last {lost} bytes are ignored"
        assert run.problems == ((sentence,) if lost else ())
    path.write_bytes(content[:-1])  # whole but for its newline
    assert read_run(tmp_path).problems == ()


def test_a_broken_line_in_the_middle_is_skipped_and_named(tmp_path: Path) -> None:
    attempt(tmp_path, 0, range(10, 51, 10))
    path = tmp_path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\xff\x00 garbage\n"
    lines[3] = b'{"no": "step"}\n'
    path.write_bytes(b"".join(lines))
    run = read_run(tmp_path)
    assert [record["step"] for record in run.records] == [10, 30, 50]
    assert run.problems == ("records.jsonl has 2 broken lines, skipped: line 2, 4",)


def test_after_a_crash_and_a_new_attempt_everything_whole_is_there(tmp_path: Path) -> None:
    attempt(tmp_path, 0, range(10, 31, 10))
    for name in ("records.jsonl", "alerts.jsonl", "params.arrow"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-20])
    attempt(tmp_path, 20, range(30, 41, 10), 2.0)
    run = read_run(tmp_path)
    expected = [(10, 0), (20, 0), (30, 1), (40, 1)]
    assert [(entry["step"], entry["attempt"]) for entry in run.records] == expected
    assert [(entry["step"], entry["attempt"]) for entry in run.alerts] == expected
    assert run.params["step"].to_pylist() == [10, 10, 20, 20, 30, 30, 40, 40]
    assert run.problems == (
        "records.jsonl has 1 broken line, skipped: line 3",
        "alerts.jsonl has 1 broken line, skipped: line 3",
    )


def test_a_run_without_observations_is_empty(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, config={}, parameters=[])
    run = read_run(tmp_path)
    assert (run.records, run.alerts, run.losses, run.problems) == ([], [], {}, ())
    assert run.params.num_rows == 0
    assert "update_ratio" in run.params.column_names


def test_errors_for_paths_that_are_not_run_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(json.dumps({"other": 1}))
    for name, reason in (
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("empty", "has no run.json"),
        ("bad", "was not written by distmon"),
    ):
        with pytest.raises(RunFolderError, match=reason) as caught:
            read_run(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_of_a_large_file_the_newest_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "records.jsonl"
    lines = [f'{{"step": {step:4}}}\n' for step in range(100)]
    file.write_text("".join(lines))
    length = len(lines[0])
    for limit, first in ((10 * length, 90), (10 * length + 1, 90), (10 * length - 1, 91)):
        monkeypatch.setattr(file_tails, "MOST_BYTES", limit)
        problems: list[str] = []
        tail = LineTail(file, lambda entry, _: entry)
        assert [entry["step"] for entry in tail.read(problems)] == [*range(first, 100)]
        assert tail.left_out == first * length
        expected = "records.jsonl has 1.46 KiB: its oldest 1.3"
        assert [problem[: len(expected)] for problem in problems] == [expected]
    with file.open("a") as more:  # the limit is that of one reading, not of the file
        more.write('broken\n{"step": 100}\n')
    assert tail.read(problems) == [{"step": 100}]
    assert problems[1:] == [
        "records.jsonl has 1 broken line, skipped: line 10 after the first 1365 bytes"
    ]


def test_records_that_were_left_out_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path, 0, range(1, 3))
    entry = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    numbers = [*range(1, 90), *range(91, 100)]
    entries = [{**entry, "step": number, "observation": number} for number in numbers]
    text = "".join(json.dumps(each) + "\n" for each in entries)
    (tmp_path / "records.jsonl").write_text(text)
    monkeypatch.setattr(file_tails, "MOST_BYTES", len(text) // 2)
    run = read_run(tmp_path)
    assert run.records[-1]["step"] == 99
    assert "left out" in run.problems[0]
    assert run.problems[1:] == (
        "records.jsonl lacks 1 of 99 observations of attempt 0: after step 89",
    )

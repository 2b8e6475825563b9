from __future__ import annotations

import csv
from pathlib import Path

import pytest

from distmon.bench.machine import Machine
from distmon.bench.results import COLUMNS, RESULTS_FILE, Case, ResultsError, ResultsWriter, read

CASE = Case("gpt2", "fp32", "none", 1, 148, 124_439_808, "GPT-2, 256 tokens")
OTHER = Case("moe", "fp32", "none", 1, 9, 99)


def _written(folder: Path) -> Path:
    with ResultsWriter(folder, Machine(command="python it", cores=2, load=0.5)) as writer:
        writer.add(CASE, "naive clone", "observation", 0, 0.125)
        writer.add(CASE, "naive clone", "observation", 1, 0.25)
        writer.add(CASE, "none", "step", 0, 1.5)
        writer.add(CASE, "naive clone", "answer", 0, 0.0, "no")
        writer.add(OTHER, "naive clone", "answer", 0, 1.0, "nearly")
        writer.add(OTHER, "", "skipped", 0, 0.0, "too large")
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    results = read(_written(tmp_path / "new" / "folder"))
    assert results.cases == [CASE]
    assert results.cases[0].conditions == "GPT-2, 256 tokens"
    assert results.contenders == ["naive clone"]
    assert results.values(CASE, "naive clone", "observation") == [0.125, 0.25]
    assert results.median(CASE, "naive clone", "observation") == 0.1875
    assert results.machine == Machine(command="python it", cores=2, load=0.5)
    assert results.wrong_answers == {(CASE, "naive clone"): "no"}
    assert results.notes("answer")[OTHER, "naive clone"] == "nearly"
    assert results.notes("skipped") == {(OTHER, ""): "too large"}


def test_every_row_has_its_conditions(tmp_path: Path) -> None:
    with (_written(tmp_path) / RESULTS_FILE).open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert {row["command"] for row in rows} == {"python it"}
    assert {*rows[0]} == {*COLUMNS} >= {"device", "versions", "commit", "conditions", "unit"}
    assert [row["unit"] for row in rows[:3]] == ["s", "s", "s"]


def test_a_number_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = ResultsWriter(tmp_path, Machine())
    writer.add(CASE, "naive clone", "observation", 0, 1.5)
    assert read(tmp_path).values(CASE, "naive clone", "observation") == [1.5]
    writer.close()


def test_an_unknown_measure_is_refused(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path, Machine()) as writer, pytest.raises(KeyError):
        writer.add(CASE, "none", "speed", 0, 1.0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, f"cannot read .*{RESULTS_FILE}: No such file"),
        ("workload,dtype\n", "has no column contender, elements"),
        ("cut", "line 8 of .* is not a row of results"),
        ("nan", "line 2 of .* has the value nan"),
        (",".join(COLUMNS) + "\n", "holds no observation of any contender"),
        (b"\xff\xfe", "it is not UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, content: str | bytes | None, sentence: str
) -> None:
    path = _written(tmp_path) / RESULTS_FILE
    if content is None:
        path.unlink()
    elif content == "cut":
        path.write_text(path.read_text() + "gpt2,fp32,none")
    elif content == "nan":
        path.write_text(path.read_text().replace(",0.125,", ",nan,"))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    with pytest.raises(ResultsError, match=sentence):
        read(tmp_path)

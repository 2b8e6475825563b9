from __future__ import annotations

from pathlib import Path

import pytest

from distmon_benchmarks.results import (
    CONTEXT,
    ROUNDS,
    Case,
    Context,
    ResultsError,
    ResultsWriter,
    read,
)

CASE = Case("gpt2", "fp32", "none", 1, 148, 124_439_808)


def _written(folder: Path) -> Path:
    with ResultsWriter(folder, Context(command="python it", cores=2)) as writer:
        writer.add(CASE, "naive clone", "observation", 0, 0.125)
        writer.add(CASE, "naive clone", "observation", 1, 0.25)
        writer.add(CASE, "none", "step", 0, 1.5)
        writer.context.found_wrong("a", "gpt2 fp32", "no")
        writer.context.found_wrong("a", "moe fp32", "nor here")
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    results = read(_written(tmp_path / "new" / "folder"))
    assert results.cases() == [CASE]
    assert results.contenders(CASE) == ["naive clone", "none"]
    assert results.values(CASE, "naive clone", "observation") == [0.125, 0.25]
    assert {row.unit for row in results.rows} == {"s"}
    assert results.context.command == "python it"
    assert results.context.cores == 2
    assert results.context.wrong == {"a": "gpt2 fp32: no; moe fp32: nor here"}


def test_a_number_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = ResultsWriter(tmp_path, Context())
    writer.add(CASE, "none", "step", 0, 1.5)
    assert read(tmp_path).values(CASE, "none", "step") == [1.5]
    writer.close()


def test_an_unknown_measure_is_refused(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path, Context()) as writer, pytest.raises(KeyError):
        writer.add(CASE, "none", "speed", 0, 1.0)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (ROUNDS, None, f"cannot read .*{ROUNDS}: No such file"),
        (ROUNDS, "workload,dtype\n", "has no column contender, elements"),
        (ROUNDS, "cut", "is not a whole line of results"),
        (ROUNDS, b"\xff\xfe", "it is not UTF-8 text"),
        (CONTEXT, None, f"cannot read .*{CONTEXT}: No such file"),
        (CONTEXT, "[1]", "is not the context of a benchmark run"),
        (CONTEXT, "{", "is not the context of a benchmark run"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: str | bytes | None, told: str
) -> None:
    path = _written(tmp_path) / name
    if content is None:
        path.unlink()
    elif content == "cut":
        path.write_text(path.read_text()[:-20])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    with pytest.raises(ResultsError, match=told):
        read(tmp_path)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sample_alerts import FROZEN, NAN
from sample_run import MakeRecord, OpenFolder
from small_runs import observe

from distmon.metrics import PARAM_METRICS, PERCENTILE_METRICS
from distmon.record.record import ParamTable
from distmon.runs.params_file import batch_message, schema, schema_message
from distmon.runs.reader import read_run
from distmon.sinks import arrow
from distmon.sinks.arrow import ArrowSink


def write(sink: ArrowSink, make_record: MakeRecord, *steps: int) -> None:
    for step in steps:
        sink.record(make_record(step))
    sink.close()


def test_pandas_polars_and_duckdb_read_it(make_record: MakeRecord, open_folder: OpenFolder) -> None:
    folder = open_folder()
    record = make_record(10)
    sink = ArrowSink(folder)
    sink.record(record)
    # Not closed yet: a batch is there as soon as it was written.
    stream = pa.ipc.open_stream(str(folder.params_path)).read_all()
    frame = stream.to_pandas()
    names = [metric.name for metric in (*PARAM_METRICS, *PERCENTILE_METRICS)]
    assert list(frame.columns) == ["step", "attempt", "name", *names]
    assert list(frame["name"]) == list(record.params.names)
    for metric in PARAM_METRICS:
        np.testing.assert_array_equal(frame[metric.name], record.params.columns[metric.name])
    for metric in PERCENTILE_METRICS:
        np.testing.assert_array_equal(frame[metric.name], record.params.percentiles[metric.name])
    sink.record(make_record(20))
    sink.close()

    polars = pl.read_ipc_stream(folder.params_path)
    assert polars.filter(pl.col("step") == 20).height == 3
    history = read_run(folder.path).params
    assert isinstance(history.to_pandas(), pd.DataFrame)
    counts = duckdb.sql("select step, count(*) from history group by step order by step").fetchall()
    assert counts == [(10, 3), (20, 3)]


def test_of_a_large_model_one_observation_in_several_is_written(
    make_record: MakeRecord,
    open_folder: OpenFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = len(batch_message(make_record(1), 0))
    monkeypatch.setattr(arrow, "BYTES_PER_OBSERVATION", size // 3)  # rounded up: one in four
    folder = open_folder()
    sink = ArrowSink(folder)
    for step in range(1, 12):
        sink.record(make_record(step))
        if step == 3:
            sink.alert(NAN)
            sink.alert(FROZEN)
    sink.close()
    steps = read_run(folder.path).params["step"].to_pylist()
    assert [*dict.fromkeys(steps)] == [1, 3, 7, 11]
    (line,) = caplog.messages
    assert "3 parameters" in line
    assert "one in 4 is written" in line


def test_without_histograms_percentiles_are_null_and_nan_stays_nan(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    sink = ArrowSink(folder)
    record = make_record(1, histogram=False)
    columns = {**record.params.columns, "grad_norm": np.array([np.nan, np.inf, 1e300])}
    sink.record(replace(record, params=ParamTable(record.params.names, columns)))
    sink.close()
    table = read_run(folder.path).params
    assert table["grad_p50"].null_count == 3
    np.testing.assert_array_equal(table["grad_norm"].to_numpy(), [np.nan, np.inf, 1e300])


def test_cut_anywhere_it_reads_to_the_last_whole_batch(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    write(ArrowSink(folder), make_record, 1, 2, 3)
    content = folder.params_path.read_bytes()
    ends = [len(schema_message())]
    for step in (1, 2, 3):
        ends.append(ends[-1] + len(batch_message(make_record(step), 0)))
    assert ends[-1] == len(content)
    cuts = {*range(0, len(content), 97), *(end + shift for end in ends for shift in (-1, 0, 1, 5))}
    for cut in sorted(cuts):
        if cut > len(content):
            continue
        folder.params_path.write_bytes(content[:cut])
        whole = sum(cut >= end for end in ends)
        run = read_run(folder.path)
        assert sorted(set(run.params["step"].to_pylist())) == list(range(1, whole))
        lost = cut - (ends[whole - 1] if whole else 0)
        expected = f"params.arrow ends in the middle of an entry: its last {lost} bytes are ignored"
        assert run.problems == ((expected,) if lost else ())


def test_a_new_attempt_continues_wherever_the_file_was_cut(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    write(ArrowSink(folder), make_record, 1, 2)
    content = folder.params_path.read_bytes()
    second = len(content) - len(batch_message(make_record(2), 0))
    later = open_folder(resumed_from=2)
    for cut in (*range(0, len(content), 997), second - 1, second, second + 3, len(content)):
        folder.params_path.write_bytes(content[:cut])
        write(ArrowSink(later), make_record, 3)
        # The plain readers must be able to read it too: nothing broken is left inside.
        frame = pl.read_ipc_stream(folder.params_path)
        kept = (cut >= second) + (cut >= len(content))
        assert frame["step"].unique().sort().to_list() == [*range(1, kept + 1), 3]
        assert frame.filter(pl.col("step") == 3)["attempt"].to_list() == [1, 1, 1]
        assert read_run(folder.path).problems == ()
        assert len(list(folder.path.glob("params*.arrow"))) == 1


@pytest.mark.parametrize("tail", [b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x00" * 4096])
def test_an_end_marker_or_unwritten_blocks_do_not_stop_the_next_attempt(
    make_record: MakeRecord, open_folder: OpenFolder, tail: bytes
) -> None:
    folder = open_folder()
    write(ArrowSink(folder), make_record, 1)
    with open(folder.params_path, "ab") as file:
        file.write(tail)
    assert bool(read_run(folder.path).problems) == (len(tail) > 8)
    write(ArrowSink(open_folder(resumed_from=1)), make_record, 2)
    assert read_run(folder.path).params["step"].to_pylist() == [1, 1, 1, 2, 2, 2]
    assert read_run(folder.path).problems == ()


def test_a_file_with_other_columns_is_set_aside_and_still_read(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    old = pa.table(
        {
            "step": pa.array([1], pa.int64()),
            "attempt": pa.array([0], pa.int32()),
            "name": ["w"],
            "retired": [0.5],
        }
    )
    for _ in range(2):
        with pa.ipc.new_stream(str(folder.params_path), old.schema) as writer:
            writer.write_table(old)
        write(ArrowSink(folder), make_record, 2)
    assert sorted(path.name for path in folder.path.glob("params*")) == [
        "params.0.arrow",
        "params.1.arrow",
        "params.arrow",
    ]
    run = read_run(folder.path)
    assert run.params["step"].to_pylist() == [1, 1, 2, 2, 2]
    assert run.params["retired"].to_pylist() == [0.5, 0.5, None, None, None]
    assert run.problems == ()


def test_a_foreign_file_is_set_aside(make_record: MakeRecord, open_folder: OpenFolder) -> None:
    folder = open_folder()
    folder.params_path.write_bytes(b"hello, this is no arrow file" * 20)
    write(ArrowSink(folder), make_record, 2)
    assert (folder.path / "params.0.arrow").read_bytes().startswith(b"hello")
    assert read_run(folder.path).params.num_rows == 3


def test_a_damaged_batch_is_skipped_and_counted(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    write(ArrowSink(folder), make_record, 1, 2)
    content = bytearray(folder.params_path.read_bytes())
    first = len(schema_message()) + len(batch_message(make_record(1), 0))
    content[first - 1500 : first - 500] = b"\xaa" * 1000
    folder.params_path.write_bytes(content)
    run = read_run(folder.path)
    assert run.params["step"].to_pylist() == [2, 2, 2]
    assert run.problems == ("params.arrow has 1 damaged entries, skipped",)


def test_the_schema_is_what_the_metric_tables_say() -> None:
    assert schema().names[3:] == [m.name for m in (*PARAM_METRICS, *PERCENTILE_METRICS)]


def test_the_documented_lines_read_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe(tmp_path, steps=2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs/latest")
    page = Path(__file__).parents[2] / "docs/runs.md"
    block = page.read_text().split("```python one line each\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    packages = {"duckdb": duckdb, "polars": pl, "pyarrow": pa}
    tables = [eval(line, packages) for line in block.splitlines()]
    assert [len(table) for table in tables] == [12, 12, 12]

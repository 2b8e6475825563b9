"""The view of a run: right numbers in bounded size, and views of what is new that continue it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from test_downsampling import unpacked

import distmon
from benchmarks.report.synthetic_run import layer_names, made_up_record, write_run
from distmon.report.encoding import script_json
from distmon.report.param_history import DETAILED, MAX_ROWS
from distmon.report.recent import RecentRun
from distmon.report.run_state import run_state
from distmon.report.series import losses
from distmon.report.view import build_view, view_and_layout
from distmon.rules.alert import Alert
from distmon.runs.reader import RunTail, read_run
from distmon.runs.run_folder import RunFolder
from distmon.sinks.arrow import ArrowSink
from distmon.sinks.jsonl import JsonlSink


def write_more(path: Path, steps: range, names: tuple[str, ...]) -> None:
    """Records of the attempt that is going on."""
    folder = RunFolder.open(path, config={}, parameters=[])
    folder.attempt -= 1
    sinks = JsonlSink(folder), ArrowSink(folder)
    for step in steps:
        for sink in sinks:
            sink.record(made_up_record(step, names, 10, 2, 0))
    for sink in sinks:
        sink.close()


def test_the_heat_map_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 12, 30)
    view = build_view("run", RunTail(path).read())
    grid = view["params"]["grids"]["update_ratio"]
    values = unpacked(grid["data"]).reshape(30, 12)
    expected = read_run(path).params["update_ratio"].to_numpy().reshape(30, 12)
    np.testing.assert_allclose(values, expected, rtol=2**-8)
    assert grid["steps"] == [*range(10, 301, 10)]
    assert view["loss"]["steps"] == [*range(1, 301)]
    assert view["scalars"]["values"]["performance/mfu"] == [0.41] * 30
    assert view["state"] == {"name": "finished", "why": "reached step 300"}


def test_long_and_wide_runs_stay_bounded(tmp_path: Path) -> None:
    alert = Alert("frozen", "warning", 50, "it", params=("blocks.4999.norm.bias",))
    path = write_run(tmp_path / "run", 25_000, 3, alerts=(alert,))
    params = build_view("run", RunTail(path).read(), globs=["blocks.77.*"])["params"]
    assert (len(params["names"]), params["total"]) == (MAX_ROWS, 25_000)
    detailed = [params["names"][row] for row in params["detailed"]]
    assert len(detailed) == DETAILED
    assert {"blocks.77.norm.bias", "blocks.4999.norm.bias"} <= {*detailed}
    assert len(script_json(params)) < 7e6


def test_views_of_what_is_new_continue_the_view(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 12, 5)
    tail = RunTail(path)
    _, layout = view_and_layout("run", tail.read())
    assert not tail.read().records
    write_more(path, range(60, 81, 10), layer_names(12)[::-1])
    news = tail.read()
    assert not news.replaces
    view, _ = view_and_layout("run", news, layout=layout)
    assert view["scalars"]["steps"] == [60, 70, 80]
    assert view["params"]["names"] == [*layer_names(12)]
    columns = unpacked(view["params"]["grids"]["update_ratio"]["data"]).reshape(3, 12)
    written = made_up_record(60, layer_names(12)[::-1], 10, 2, 0).params
    np.testing.assert_allclose(columns[0], written.columns["update_ratio"][::-1], rtol=2**-8)


def test_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 3, 5)
    tail = RunTail(path)
    assert tail.read().replaces
    folder = RunFolder.open(path, config={}, parameters=[])
    folder.begin_attempt(resumed_from=20, world_size=2)
    sink = JsonlSink(folder)
    sink.record(made_up_record(30, layer_names(3), 10, 2, 1))
    sink.close()
    news = tail.read()
    assert news.replaces
    assert [record["step"] for record in news.records] == [10, 20, 30]
    assert [record["attempt"] for record in news.records] == [0, 0, 1]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 3, 2)
    tail = RunTail(path)
    tail.read()
    file = path / "records.jsonl"
    line = file.read_bytes().splitlines()[-1].replace(b'"step": 20', b'"step": 30')
    with file.open("ab") as out:
        out.write(line[:100])
        out.flush()
        assert tail.read().records == []
        out.write(line[100:] + b"\n")
    assert [record["step"] for record in tail.read().records] == [30]
    assert tail.read().records == []


def test_states(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 3, 10)
    run = read_run(path)
    last = run.records[-1]["time"]
    unfinished = {**run.info, "config": {"total_steps": 500}}
    assert run_state(unfinished, [], [], last) == ("empty", "no observation yet")
    assert run_state(unfinished, run.records, [], last + 5) == ("running", "step 100 of 500")
    state, why = run_state(unfinished, run.records, [], last + 7200)
    assert (state, why) == ("died", "no record for 2.0 h; the last is of step 100 of 500")
    alert = {"step": 90, "severity": "warning", "rule": "frozen"}
    assert run_state(unfinished, run.records, [alert], last)[0] == "alerting"
    assert run_state(unfinished, run.records, [{**alert, "step": 20}], last)[0] == "running"
    closed = [*run.records, {**run.records[-1], "partial": True, "step": 104}]
    ended = ("finished", "closed after step 104 of 500")
    assert run_state(unfinished, closed, [], last + 7200) == ended


def test_a_run_that_was_closed_is_finished_at_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with distmon.attach(model, optimizer, interval=10, run_dir=tmp_path / "run") as monitor:
        torch.manual_seed(0)
        for _ in range(20):  # the last step is observed, so that close() writes no partial record
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)
    ended = {"name": "finished", "why": "closed after step 20"}
    assert build_view("run", RunTail(tmp_path / "run").read())["state"] == ended
    recent = RecentRun(tmp_path / "run")
    recent.update()
    assert recent.state(time.time() + 7200) == ("finished", "closed after step 20")
    (tmp_path / "run" / "ends.jsonl").unlink()
    killed = RecentRun(tmp_path / "run")
    killed.update()
    assert killed.state(time.time())[0] in ("running", "alerting")
    assert killed.state(time.time() + 7200)[0] == "died"


def test_values_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    names = layer_names(2)
    record = made_up_record(10, names, 10, 2, 0)
    columns = {**record.params.columns, "grad_nan": np.array([0.0, 1.0])}
    columns["update_ratio"] = np.array([1e-3, np.nan])
    folder = RunFolder.open(tmp_path / "run", config={}, parameters=[])
    folder.begin_attempt(resumed_from=0, world_size=2)
    sinks = JsonlSink(folder), ArrowSink(folder)
    for sink in sinks:
        sink.record(
            replace(
                record,
                params=replace(record.params, columns=columns),
                losses={9: float("nan"), 10: 2.0},
            )
        )
        sink.close()
    view = json.loads(script_json(build_view("run", RunTail(tmp_path / "run").read())))
    assert np.isinf(unpacked(view["params"]["grids"]["update_ratio"]["data"])[1])
    assert view["loss"]["bad"] == [9]


def test_the_average_of_the_loss_ends_where_the_loss_does() -> None:
    values = {1: 4.0, 2: 3.0, 3: float("nan"), 4: float("inf")}
    shown = losses(values, {1: 4.0, 2: 3.9, 3: 3.9, 4: 3.9})
    assert shown["ema"] == [4.0, 3.9, None, None]
    assert shown["bad"] == [3, 4]

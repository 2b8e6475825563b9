"""watch: readable at 80 columns, continues when the run is resumed; notebooks."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from small_runs import quiet, small_model, train
from test_view import write_more

import distmon
from benchmarks.report.synthetic_run import layer_names, made_up_record, write_run
from distmon.cli.watch import render, watch
from distmon.errors import ConfigError, RunFolderError
from distmon.report.recent import RecentRun
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.jsonl import JsonlSink

NAMES = layer_names(7)


def shown(run: RecentRun, width: int = 80) -> str:
    text = StringIO()
    Console(file=text, width=width).print(render(run, width, 1.7e9 + 60))
    return text.getvalue()


def test_it_fits_80_columns_and_shows_what_matters(tmp_path: Path) -> None:
    alert = Alert("frozen", "warning", 50, "[bold]not markup[/] " * 9, params=NAMES)
    path = write_run(tmp_path / "run", names=NAMES, observations=5, alerts=(alert,))
    run = RecentRun(path)
    assert run.update()
    text = shown(run)
    for name in ("loss", "gradient norm", "update ratio"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert " to " in line  # the end of the row, so it was not wrapped
    for words in ("finished", "loss", "gradient norm", "update ratio", "rank 1", "warning frozen"):
        assert words in text
    assert "[bold]not markup[/]" in text
    assert not run.update()


def test_long_names_keep_their_end(tmp_path: Path) -> None:
    names = tuple(f"{'very.' * 30}{i}.weight" for i in range(4))
    run = RecentRun(write_run(tmp_path / "run", names=names, observations=5))
    run.update()
    for width in (60, 80, 200):
        assert all(f"very.{i}.weight " in shown(run, width) for i in range(4)), width


def test_it_continues_when_the_run_is_resumed_or_away(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", names=NAMES, observations=5, total_steps=900)
    run = RecentRun(path)
    run.update()
    write_more(path, range(60, 71, 10), NAMES)
    assert run.update()
    assert len(run.losses) == 70
    path.rename(tmp_path / "away")
    assert not run.update()
    assert "waiting: " in shown(run)
    (tmp_path / "away").rename(path)
    folder = RunFolder.open(path, config={"total_steps": 900}, parameters=[])
    folder.begin_attempt(resumed_from=40, world_size=3)
    sink = JsonlSink(folder)
    sink.record(made_up_record(50, NAMES, 10, 3, 1))
    sink.close()
    assert run.update()
    assert (len(run.losses), run.records[-1]["step"]) == (50, 50)
    assert "3 ranks; attempt 1 from 40" in shown(run).replace("\n", " ")


def test_a_nan_comes_first_and_stragglers_are_named(tmp_path: Path) -> None:
    def spoil(step: int) -> None:
        if step == 3:
            [*model.parameters()][2].grad[0, 0] = float("nan")  # type: ignore[index]

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        train(model, optimizer, monitor, range(1, 4), spoil, check=False)
        figure = monitor.plot()
        assert {trace.name for trace in figure.data} >= {"loss", "moving average", "grad norm"}
        record = monitor.last_record
    assert record is not None
    assert "monitor/grad_norm" in record._repr_html_()
    text = StringIO()
    Console(file=text, width=100).print(record)
    assert "train/step_loss" in text.getvalue()
    run = RecentRun(tmp_path / "run")
    run.update()
    assert run.worst_params(1)[0].name == "2.weight"
    assert "critical nonfinite" in distmon.read_run(tmp_path / "run")._repr_html_()
    folder = RunFolder.open(tmp_path / "empty", config={}, parameters=[])
    from distmon.report.notebook import plot_run

    assert "No record yet" in plot_run(folder.path).layout.annotations[-1].text


def test_without_a_terminal_it_prints_once(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        watch(Console(file=StringIO()), tmp_path, 1.0, once=True)
    text = StringIO()
    watch(Console(file=text, width=80), write_run(tmp_path / "run", 3, 3), 1.0, once=False)
    assert "finished: reached step 30" in text.getvalue()
    monitor = distmon.attach(
        small_model(), torch.optim.SGD(small_model().parameters(), 0.1), enabled=False
    )
    assert monitor.plot() is None
    assert issubclass(ConfigError, distmon.DistmonError)

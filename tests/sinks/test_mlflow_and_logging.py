from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_run import MakeRecord, OpenFolder

from distmon.config import MonitorConfig
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories

ALERT = Alert("frozen", "critical", 20, "it is frozen", advice=("thaw it",))


def _deliver(folder: RunFolder, sink: str, *items: Any) -> None:
    config = MonitorConfig(sinks=(sink,))
    delivery = Delivery(build_factories(config, folder), config.queue_size)
    for item in items:
        if isinstance(item, Alert):
            delivery.post_alert(item)
        else:
            delivery.post_record(item)
    assert delivery.close(60)[sink] == {"written": len(items), "failed": 0, "dropped": 0}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    yield mlflow.MlflowClient()
    while mlflow.active_run():
        mlflow.end_run()


def test_mlflow_run_of_its_own(
    client: Any, make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    record = make_record(20)
    _deliver(folder, "mlflow", make_record(10), record, ALERT)
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == folder.path.name
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/step_loss")
    assert [(m.step, m.value) for m in history] == [(9, 2.5), (10, 2.1847), (19, 2.5), (20, 2.1847)]
    assert run.data.metrics["monitor/grad_norm"] == 0.81
    assert run.data.params["distmon.interval"] == "10"
    assert "it is frozen" in run.data.tags["distmon.alert.frozen"]


def test_mlflow_joins_the_trainers_run(
    client: Any, make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    import mlflow

    with mlflow.start_run() as active:
        mlflow.log_metric("train/step_loss", 7.0, step=1)
        _deliver(open_folder(), "mlflow", make_record(10))
        assert mlflow.active_run() is not None
    (run,) = client.search_runs(["0"])
    assert run.info.run_id == active.info.run_id
    assert run.data.metrics["train/step_loss"] == 7.0
    assert run.data.metrics["distmon/train/step_loss"] == 2.1847


def test_the_lines_go_to_the_logger(
    make_record: MakeRecord, open_folder: OpenFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "distmon.records"):
        _deliver(open_folder(), "logging_lines", make_record(20), ALERT)
    line, alert = caplog.records
    assert line.getMessage().startswith("step:20 loss:2.1847")
    assert line.__dict__["metrics"]["monitor/grad_norm"] == 0.81
    assert (alert.levelname, alert.__dict__["rule"]) == ("CRITICAL", "frozen")
    assert alert.getMessage() == "frozen at step 20: it is frozen 1. thaw it"

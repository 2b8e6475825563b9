from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from local_services import http_service
from sample_run import MakeRecord, OpenFolder
from small_runs import quiet, small_model, train

import distmon
from distmon.config import MonitorConfig
from distmon.metrics import PARAM_METRICS, PERCENTILE_METRICS
from distmon.record.record import GainTable, ParamTable
from distmon.redaction import Redactor
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_json import strict_json
from distmon.sinks import Delivery, build_factories
from distmon.sinks.bundle import BundleSink
from distmon.sinks.environment import TrainingProcess
from distmon.sinks.jsonl import record_entry

NAN = Alert("nonfinite", "critical", 120, "NaN", ("a.weight",), ranks=(1,), advice=("stop",))
FLOW = GainTable(("blocks.0", "blocks.1"), np.array([3.0, 1.0]), np.array([2.0, 4.0]))
ENVIRON = {
    "NCCL_DEBUG": "INFO",
    "SLURM_JOB_ID": "7",
    "WANDB_API_KEY": "k3y",
    "DISTMON_NOTIFY__URLS": "slack://hunter2",
    "TORCH_HUB": "https://joe:hunter2@hub",
    "HOME": "/home/joe",
}


def bundles(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "bundles").iterdir())


def made(folder: RunFolder, wanted: Sequence[str] = ("nonfinite",), **changes: Any) -> BundleSink:
    given: dict[str, Any] = {
        "redactor": Redactor(),
        "environ": ENVIRON,
        "training": TrainingProcess(["train.py", "--api-key", "hunter2"]),
        "clock": lambda: 5.0,
    }
    return BundleSink(folder, wanted, **{**given, **changes})


def test_a_bundle_has_the_records_before_the_alert(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    sink = made(folder)
    records = [
        make_record(step, gradient_gain=FLOW if step == 110 else None) for step in range(95, 120)
    ]
    for record in records:
        sink.record(record)
    # What is told at the end of a run has no tables; the newest of before are written.
    late = make_record(120, ranks={})
    late = replace(late, params=ParamTable.empty())
    sink.record(late)
    sink.alert(NAN)
    sink.close()
    assert bundles(folder) == ["step-000120-nonfinite"]
    at = folder.path / "bundles/step-000120-nonfinite"
    assert json.loads((at / "alert.json").read_text()) == {
        **json.loads(strict_json(NAN.to_dict())),
        "attempt": 0,
        "time": 5.0,
    }
    lines = (at / "records.jsonl").read_text().splitlines()
    assert lines == [strict_json(record_entry(r, 0)) for r in [*records, late][-20:]]

    params = pd.read_csv(at / "params.csv", index_col="name")
    metrics = [metric.name for metric in (*PARAM_METRICS, *PERCENTILE_METRICS)]
    assert set(params.columns) == set(metrics)
    table = records[-1].params
    for metric, column in {**table.columns, **table.percentiles}.items():
        assert params.loc[list(table.names), metric].tolist() == column.tolist()
    ranks = pd.read_csv(at / "ranks.csv", index_col="rank")
    assert ranks["step_seconds"].to_dict() == {0: 0.04, 1: 0.041}
    flow = pd.read_csv(at / "flow.csv", index_col="block")
    assert flow.loc["blocks.1"].to_dict() == {"input_norm": 1.0, "output_norm": 4.0, "gain": 0.25}

    machine = json.loads((at / "environment.json").read_text())
    assert machine["versions"]["torch"] == machine["packages"]["torch"]
    assert machine["command"] == ["train.py", "--api-key", "***"]
    assert machine["environment"] == {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}
    explained = (at / "README.txt").read_text()
    assert all(path.name in explained for path in at.iterdir() if path.name != "README.txt")


def test_not_a_number_is_readable(make_record: MakeRecord, open_folder: OpenFolder) -> None:
    folder = open_folder()
    sink = made(folder)
    table = ParamTable(("a",), {"grad_norm": np.array([np.nan]), "weight_norm": np.array([np.inf])})
    sink.record(make_record(119, params=1, losses={119: float("nan")}))
    sink.record(replace(make_record(120), params=table))
    sink.alert(NAN)
    at = folder.path / "bundles/step-000120-nonfinite"
    assert (at / "params.csv").read_text().splitlines() == [
        "name,grad_norm,weight_norm",
        "a,nan,inf",
    ]
    assert json.loads((at / "records.jsonl").read_text().splitlines()[0])["loss_values"] == [None]


def test_an_alert_before_the_first_record_has_a_bundle_too(open_folder: OpenFolder) -> None:
    folder = open_folder()
    made(folder).alert(NAN)
    names = {path.name for path in (folder.path / "bundles/step-000120-nonfinite").iterdir()}
    assert names == {"alert.json", "records.jsonl", "environment.json", "README.txt"}


def test_one_bundle_for_a_rule_and_step_and_ten_altogether(
    open_folder: OpenFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder()
    sink = made(folder, ["non*", "warning"])
    sink.alert(replace(NAN, rule="frozen", severity="info"))
    assert not (folder.path / "bundles").exists()
    sink.alert(NAN)
    sink.alert(replace(NAN, message="again"))
    assert bundles(folder) == ["step-000120-nonfinite"]
    assert '"NaN"' in (folder.path / "bundles/step-000120-nonfinite/alert.json").read_text()
    sink.alert(replace(NAN, rule="my rule/../x", severity="warning"))
    assert bundles(folder)[0] == "step-000120-my_rule_.._x"
    with caplog.at_level(logging.WARNING, "distmon"):
        for step in range(200, 230):
            (folder.path / "bundles/.unfinished").mkdir(exist_ok=True)  # counts for nothing
            sink.alert(replace(NAN, step=step))
    assert len(bundles(folder)) == 10 + 1
    assert caplog.messages == [
        f"distmon: {folder.path / 'bundles'} holds 10 debug bundles; no more are written"
    ]


def test_another_attempt_keeps_the_bundles_of_the_first(open_folder: OpenFolder) -> None:
    made(open_folder()).alert(NAN)
    folder = open_folder(resumed_from=100)
    made(folder).alert(NAN)
    assert bundles(folder) == ["step-000120-nonfinite", "step-000120-nonfinite-attempt-1"]


def test_a_bundle_is_whole_or_absent(open_folder: OpenFolder, make_record: MakeRecord) -> None:
    class FullDisk(Redactor):
        def arguments(self, _: Sequence[str]) -> list[str]:
            assert (folder.path / "bundles/.unfinished/params.csv").exists()
            raise OSError("no space left on device")

    folder = open_folder()
    sink = made(folder, redactor=FullDisk())
    sink.record(make_record(100))
    with pytest.raises(OSError, match="no space left"):
        sink.alert(NAN)
    assert bundles(folder) == []

    left = folder.path / "bundles/.unfinished"
    left.mkdir()
    (left / "flow.csv").write_text("of a process that was killed")
    made(folder).alert(NAN)
    assert bundles(folder) == ["step-000120-nonfinite"]
    assert not (folder.path / "bundles/step-000120-nonfinite/flow.csv").exists()


def test_an_unwritable_folder_does_not_affect_other_sinks(
    open_folder: OpenFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder()
    (folder.path / "bundles").write_text("a file")
    config = MonitorConfig(sinks=("jsonl",), actions={"bundle": ("critical",)})
    delivery = Delivery(build_factories(config, folder), config.queue_size)
    with caplog.at_level(logging.WARNING, "distmon"):
        delivery.post_alert(NAN)
        stats = delivery.close()
    assert stats["jsonl"]["written"] == stats["bundle"]["failed"] == 1
    assert caplog.messages[0].startswith(
        'distmon: the sink "bundle" failed on one item and stays in use: '
    )


@pytest.mark.parametrize(
    ("actions", "there"),
    [({}, False), ({"checkpoint": "critical"}, False), ({"bundle": "x"}, True), ("stop", True)],
)
def test_there_are_bundles_when_an_action_asks_for_them(
    actions: Any, there: bool, open_folder: OpenFolder
) -> None:
    factories = build_factories(MonitorConfig(sinks=(), actions=actions), open_folder())
    assert [name for name, _ in factories] == (["bundle"] if there else [])


def test_a_stopped_run_sends_notifications_and_writes_a_bundle(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with http_service() as service:
        monitor = distmon.attach(
            model,
            optimizer,
            **quiet(tmp_path, notify={"urls": [f"json://x:hunter2@{service.address}/w3bh00k"]}),
            actions={"stop": "nonfinite"},
        )
        train(model, optimizer, monitor, range(1, 3))
        with torch.no_grad():
            model.get_parameter("2.weight")[0, 0] = float("nan")
        with monitor, pytest.raises(distmon.TrainingStopped):
            train(model, optimizer, monitor, range(3, 9))
    assert "CRITICAL nonfinite at step 3: run run" in service.titles
    at = tmp_path / "run/bundles/step-000003-nonfinite"
    assert len((at / "records.jsonl").read_text().splitlines()) == 3
    assert len(pd.read_csv(at / "params.csv")) == len([*model.parameters()])
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["config"]["notify"]["urls"] == ["**********"]


def test_only_this_user_reads_a_bundle_and_no_link_is_followed(
    open_folder: OpenFolder, tmp_path: Path
) -> None:
    folder = open_folder()
    sink = BundleSink(folder, ["*"], Redactor(), {"SLURM_JWT": "x", "RANK": "0"}, TrainingProcess())
    sink.alert(Alert("rule", "critical", 3, "text"))
    (bundle,) = (folder.path / "bundles").iterdir()
    assert bundle.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in bundle.iterdir()} == {0o600}
    shown = json.loads((bundle / "environment.json").read_text())["environment"]
    assert shown == {"RANK": "0"}
    (folder.path / "bundles").rename(tmp_path / "moved")
    (folder.path / "bundles").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(OSError, match="symbolic link"):
        sink.alert(Alert("rule", "critical", 4, "text"))
    assert not [*(tmp_path / "elsewhere").iterdir()]

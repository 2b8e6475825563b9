"""A run folder gives back the records that the rules saw, and so the alerts that they raised."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rules.sample_records import make_record
from small_runs import observe, small_model

import distmon
from distmon.record.record import Evaluation, GainTable, InsideTable, ParamTable, Record
from distmon.reduce.findings import Desync, NonFinite, NonFinitePlace
from distmon.replay import find_sources, read_source, replay_run
from distmon.replay.run_folders import records_of_run
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.arrow import ArrowSink
from distmon.sinks.jsonl import JsonlSink

AT_ONCE = "is told at the next observation"
"""What an alert says that was sent between two observations."""


def _write(path: Path, records: list[Record], resumed_from: int = 0) -> RunFolder:
    folder = RunFolder.open(path, config={}, parameters=[])
    folder.begin_attempt(resumed_from=resumed_from, world_size=2)
    for sink in (JsonlSink(folder), ArrowSink(folder)):
        for record in records:
            sink.record(record)
        sink.close()
    return folder


def _told(alerts: tuple[Alert, ...]) -> list[tuple[Any, ...]]:
    return [(a.step, a.rule, a.severity, a.message, a.params) for a in alerts]


def _written(run: Path) -> list[tuple[Any, ...]]:
    return [
        (a["step"], a["rule"], a["severity"], a["message"], tuple(a["params"]))
        for a in distmon.read_run(run).alerts
        if AT_ONCE not in a["message"]
    ]


def _rules_of(run: Path) -> dict[str, Any]:
    return dict(distmon.read_run(run).info["config"]["rules"])


def test_a_trainers_run_gives_the_alerts_that_it_gave(trained_run: Path) -> None:
    replay = replay_run(trained_run, _rules_of(trained_run))
    assert _told(replay.alerts) == _written(trained_run)
    assert {"loss_spike", "update_ratio_high", "loss_is_high"} <= set(replay.by_rule())
    assert replay.failures == ()
    assert replay.observations == 20


def test_other_rules_give_other_alerts(trained_run: Path) -> None:
    rules = _rules_of(trained_run)
    rules["loss_spike"] = {"enabled": False}
    without = replay_run(trained_run, rules)
    assert "loss_spike" not in without.by_rule()
    spike = [alert for alert in _written(trained_run) if alert[1] != "loss_spike"]
    assert _told(without.alerts) == spike


def test_frozen_and_nan_are_found_again(tmp_path: Path) -> None:
    model = small_model()

    def spoil(step: int) -> None:
        weight = model.get_parameter("2.weight")
        if step >= 3:
            weight.grad = None
        if step == 12:
            bias = model.get_parameter("0.bias")
            assert bias.grad is not None
            bias.grad[3] = torch.nan

    rules = {"frozen": {"cooldown": 1}}
    observe(tmp_path, 14, model, before_optimizer=spoil, rules=rules, interval=2)
    run = tmp_path / "run"
    replay = replay_run(run, _rules_of(run))
    assert _told(replay.alerts) == _written(run)
    assert {"frozen", "nonfinite"} <= set(replay.by_rule())
    (located,) = {a.params for a in replay.by_rule()["nonfinite"] if a.step == 12}
    assert located == ("0.bias",)


def test_every_field_comes_back(tmp_path: Path) -> None:
    full = make_record(
        4,
        {"a.w": {"grad_norm": np.nan}, "b.w": {"update_expected": 1.0}},
        time=1.5,
        world_size=2,
        metrics={"train/step_loss": 2.0, "monitor/grad_norm": np.nan},
        ranks={"step_seconds": np.array([1.0, np.nan])},
        mfu_source="given, peak 1 TFLOP/s",
        losses={3: np.nan, 4: 2.0},
        loss_ema={4: 2.0},
        applied=False,
        gradient_gain=GainTable(("b0", "b1"), np.array([1.0, np.nan]), np.array([2.0, 3.0])),
        evaluations=(Evaluation(1, 3, None, 2.5, np.nan, None, 0.5, None, 2),),
        tasks={"main": 1.0, "aux": np.nan},
        nonfinite=NonFinite(3, "loss", (NonFinitePlace("a.w", 1, 0, 0, 7, 1),), 1),
        desync=Desync((1,), 0, ("a.w", "b.w"), True),
        faults=("rank 1 failed to observe step 4: gone",),
        inside={"activations": InsideTable(("b0",), {"mean": np.array([0.5])})},
        observation=2,
    )
    late = replace(full, params=ParamTable.empty(), partial=True)
    _write(tmp_path / "run", [make_record(2), full, late])
    bare = make_record(4)
    unset = [
        f.name
        for f in fields(Record)
        if f.compare and repr(getattr(full, f.name)) == repr(getattr(bare, f.name))
    ]
    # Host names are not written down: they are nobody's business but the alert's.
    told = ["step", "hosts", "partial"]
    assert unset == told, "a new field has to be set above, and read back"
    _, again, last = records_of_run(distmon.read_run(tmp_path / "run"))
    assert again.params.names == ("a.w", "b.w")
    for name, column in full.params.columns.items():
        np.testing.assert_array_equal(again.params.columns[name], column, err_msg=name)
    assert (last.partial, len(last.params)) == (True, 0)
    arrays = ("params", "ranks", "gradient_gain")
    plain = [f.name for f in fields(Record) if f.compare and f.name not in arrays]
    assert repr([getattr(again, n) for n in plain]) == repr([getattr(full, n) for n in plain])
    np.testing.assert_array_equal(again.ranks["step_seconds"], full.ranks["step_seconds"])
    assert again.gradient_gain is not None
    assert full.gradient_gain is not None
    assert again.gradient_gain.blocks == full.gradient_gain.blocks
    np.testing.assert_array_equal(again.gradient_gain.gain, full.gradient_gain.gain)


def test_later_attempts_replace_repeated_steps(tmp_path: Path) -> None:
    def at(step: int, ratio: float) -> Record:
        return make_record(step, {"w": {"update_ratio": ratio}})

    _write(tmp_path / "run", [at(2, 0.1), at(4, 0.2), at(6, 0.3)])
    _write(tmp_path / "run", [at(4, 0.5), at(6, 0.6), at(8, 0.7)], resumed_from=3)
    records = records_of_run(distmon.read_run(tmp_path / "run"))
    ratios = {r.step: r.params.row("w")["update_ratio"] for r in records}
    assert ratios == {2: 0.1, 4: 0.5, 6: 0.6, 8: 0.7}


def test_parameters_may_come_and_go(tmp_path: Path) -> None:
    names = [("a", "b"), ("a", "b"), ("b", "c"), ("b",)]
    records = [make_record(i, {n: {} for n in some}) for i, some in enumerate(names, start=1)]
    _write(tmp_path / "run", records)
    again = records_of_run(distmon.read_run(tmp_path / "run"))
    assert [record.params.names for record in again] == names


def test_without_parameter_history_other_rules_are_evaluated(
    trained_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained_run, copy)
    (copy / "params.arrow").unlink()
    (recording,) = read_source(find_sources(copy)[0])
    assert any("no parameter statistics" in note for note in recording.notes)
    replay = replay_run(copy, _rules_of(copy))
    assert "loss_spike" in replay.by_rule()
    assert "update_ratio_high" not in replay.by_rule()
    assert "update_ratio_high" in replay.idle
    assert replay.failures == ()


def test_a_python_rule_of_the_run_is_named(trained_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained_run, copy)
    info = json.loads((copy / "run.json").read_text())
    info["config"]["rules"]["my_function"] = {"patience": 2}
    (copy / "run.json").write_text(json.dumps(info))
    (recording,) = read_source(find_sources(copy)[0])
    assert recording.settings is not None
    assert "my_function" not in recording.settings
    assert "loss_is_high" in recording.settings
    assert any("my_function" in note for note in recording.notes)


def test_a_folder_of_runs_is_not_one_run(tmp_path: Path) -> None:
    for name in ("b", "a", "deeper/c"):
        _write(tmp_path / name, [make_record(2)])
    found = [source.path.name for source in find_sources(tmp_path)]
    assert found == ["a", "b", "c"]
    with pytest.raises(distmon.DistmonError, match="holds 3 runs"):
        replay_run(tmp_path)


def test_frozen_parameters_are_found_in_recordings_of_0_1() -> None:
    """They lack the column `update_expected`, which is derived from the column `frozen`."""
    recorded = Path(__file__).parents[1] / "runs" / "frozen"
    (first, *_) = replay_run(recorded).by_rule()["frozen"]
    assert first.params == ("blocks.1.mlp.up.weight",)

"""The trainer with `--monitor`: planted faults are named, a clean run is quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import about_training
from trainer_process import train

import distmon

INTERVAL = "--monitor.interval=5"


def _alerts(folder: Path) -> list[dict[str, object]]:
    return about_training(distmon.read_run(folder / "runs/latest").alerts)


def test_a_clean_run_is_recorded_and_quiet(tmp_path: Path) -> None:
    sinks = "--monitor.sinks=console,jsonl,arrow,tensorboard,wandb"
    mode = "--monitor.wandb.mode=offline"
    arguments = ["--monitoring", "--steps=30", INTERVAL, sinks, mode]
    result = train(tmp_path, *arguments, ranks=2, launched=True)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "update_ratio:" in line]
    assert [line.split()[0] for line in lines] == [f"step:{s}/30" for s in range(5, 31, 5)]
    run = distmon.read_run(tmp_path / "runs/latest")
    assert [r["step"] for r in run.records] == [5, 10, 15, 20, 25, 30]
    assert about_training(run.alerts) == []
    # wandb's service may take longer than `close` waits for it.
    assert [p for p in run.problems if "did not finish in time" not in p] == []
    assert run.info["attempts"][0]["world_size"] == 2
    assert run.params.num_rows == 6 * len(run.info["parameters"])
    assert [*run.losses] == [*range(1, 31)]
    assert any((tmp_path / "runs/latest/tb").iterdir())
    assert run.records[0]["metrics"]["performance/monitor_collectives"] == 2


@pytest.mark.parametrize(
    ("fault", "rule", "step", "ranks", "words"),
    [
        ("frozen", "frozen", 30, [], "it gets no gradient"),
        ("nan", "nonfinite", 15, [1], "first seen at step 12 through the gradient norm"),
        ("desync", "replica_desync", 15, [1], "rank 1 no longer holds the same weights"),
        ("spike", "loss_spike", 15, [], "at step 12"),
    ],
)
def test_planted_faults_are_named(
    fault: str, rule: str, step: int, ranks: list[int], words: str, tmp_path: Path
) -> None:
    param = "blocks.1.mlp.up.weight"
    plant = [f"--inject={fault}", "--inject-at=12", f"--inject-param={param}"]
    if fault == "spike":
        plant = plant[:2]
    result = train(tmp_path, "--monitoring", "--steps=30", INTERVAL, *plant, ranks=2)
    assert result.returncode == 0, result.stderr
    alerts = [a for a in _alerts(tmp_path) if a["step"] == step]
    (alert,) = [a for a in alerts if a["rule"] == rule]
    assert words in str(alert["message"])
    assert alert["ranks"] == ranks
    assert alert["params"] == ([] if fault == "spike" else [param])
    assert alert["advice"]
    assert {a["rule"] for a in _alerts(tmp_path)} == {rule}


def test_resume_with_fewer_ranks_goes_on(tmp_path: Path) -> None:
    monitor = ["--monitoring", "--monitor.interval=10", "--monitor.run-dir=runs/mine"]
    first = train(tmp_path, *monitor, "--steps=15", "--save-every=15", ranks=2)
    assert first.returncode == 0, first.stderr
    second = train(tmp_path, *monitor, "--steps=30", "--resume=latest")
    assert second.returncode == 0, second.stderr
    run = distmon.read_run(tmp_path / "runs/mine")
    assert [r["step"] for r in run.records] == [10, 20, 30]
    assert [(a["resumed_from"], a["world_size"]) for a in run.info["attempts"]] == [(0, 2), (15, 1)]
    ema = [r["metrics"]["train/step_loss_ema"] for r in run.records]
    expected = run.losses[1]
    for step in range(2, 31):
        expected = 0.99 * expected + 0.01 * run.losses[step]
    assert ema[-1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--monitor.intervall=5"], 'did you mean "interval"'),
        (
            ["--monitor.run-dir=/proc/no", "--monitor.strict=true"],
            "cannot write the run folder /proc/no",
        ),
        (["--monitor.rules.frozen.patients=2"], 'did you mean "patience"'),
    ],
)
def test_bad_monitor_input_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    result = train(tmp_path, "--monitor", *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr

"""What is done when an alert is raised: functions, checkpoints, the end of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from small_runs import quiet, small_model, train

import distmon
from distmon import Alert
from distmon.config import load_config
from distmon.errors import ConfigError
from distmon.rules.alert_patterns import matches

FROZEN = Alert("frozen", "warning", 3, "it does not move")


@pytest.mark.parametrize(
    ("patterns", "meant"),
    [
        ((), False),
        (("frozen",), True),
        (("fro*",), True),
        (("warning",), True),
        (("critical", "loss_*"), False),
    ],
)
def test_rules_are_meant_by_glob_or_severity(patterns: tuple[str, ...], meant: bool) -> None:
    assert matches(patterns, FROZEN) is meant


def test_a_bare_action_means_warnings_and_worse() -> None:
    actions = load_config({"actions": "stop, checkpoint"}, environ={}).actions
    assert actions.stop == actions.checkpoint == ("warning", "critical")
    assert actions.bundle == ()
    assert load_config({"actions": {"stop": "critical"}}, environ={}).actions.stop == ("critical",)
    with pytest.raises(ConfigError, match=r'unknown key "actions\.halt".*did you mean|valid keys'):
        load_config({"actions": "halt"}, environ={})


def test_an_action_on_no_rule_is_a_mistake(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(ConfigError, match=r'"nonfinit" in actions\.stop .* mean "nonfinite"\?'):
        distmon.attach(model, actions={"stop": "nonfinit"}, **quiet(tmp_path))


def _spoil(model: torch.nn.Module, at: int) -> Any:
    def spoil(step: int) -> None:
        if step == at:
            grad = next(model.parameters()).grad
            assert grad is not None
            grad[0, 0] = float("nan")

    return spoil


def _train_until_stopped(rank: int, _: int, folder: str) -> dict[str, Any]:
    """A NaN on the last rank alone, between two observations."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    called: list[tuple[str, int]] = []
    monitor = distmon.attach(
        model,
        optimizer,
        **quiet(Path(folder), interval=4),
        actions={"stop": "nonfinite", "checkpoint": "critical"},
        on_alert=lambda alert: called.append((alert.rule, alert.step)),
        on_checkpoint=lambda alert: called.append(("checkpoint", alert.step)),
    )
    done = 0
    spoil = _spoil(model, 6) if rank == 3 else (lambda _: None)
    try:
        for done in range(1, 200):
            train(model, optimizer, monitor, range(done, done + 1), spoil)
    except distmon.TrainingStopped as stopped:
        return {"at": done, "code": stopped.code, "called": called, "why": str(stopped)}
    finally:
        monitor.close()
    raise AssertionError("nothing stopped the training")


def test_all_ranks_stop_at_the_same_step_with_everything_delivered(tmp_path: Path) -> None:
    results = run_ranks(_train_until_stopped, 4, str(tmp_path))
    for result in results:
        # Proposed by rank 0 at step 9 and acknowledged at step 10 at the earliest.
        assert (result["at"], result["code"]) == (results[0]["at"], 86)
        assert result["at"] >= 11
        assert result["called"][-1] == ("checkpoint", 8)
        assert result["why"].startswith("stopped by nonfinite at step 8: ")
    assert [("nonfinite", 8) in result["called"] for result in results] == [True, *[False] * 3]
    lines = (tmp_path / "run/alerts.jsonl").read_text().splitlines()
    assert any(json.loads(line)["step"] == 8 for line in lines)


def test_a_stop_delivers_the_losses_since_the_last_observation(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    always = {"always": {"when": "update_ratio_max > 0", "patience": 1}}
    settings = quiet(tmp_path, interval=8, rules=always, actions={"stop": "always"})
    with distmon.attach(model, optimizer, **settings) as monitor:
        with pytest.raises(distmon.TrainingStopped):
            train(model, optimizer, monitor, range(1, 16))
        done = monitor.schedule.completed
    assert done > 8
    assert [*distmon.read_run(tmp_path / "run").losses] == [*range(1, done + 1)]


def test_a_function_that_fails_is_told_and_training_goes_on(tmp_path: Path, caplog: Any) -> None:
    def fail(_: Alert) -> None:
        raise RuntimeError("no disk")

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path), on_alert=fail) as monitor:
        records = train(model, optimizer, monitor, range(1, 5), _spoil(model, 2))
    assert len(records) == 4
    assert "on_alert failed on rank 0 (RuntimeError: no disk)" in caplog.text

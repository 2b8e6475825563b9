"""What a record says of the monitor's own time: its hooks in the passes of a step included."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import distmon
from distmon.collect.gradient_gain import block_hooks
from distmon.collect.signals.backward_passes import BackwardPasses
from distmon.collect.signals.forward_inputs import ForwardInputs
from distmon.runtime.budget import Budget
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import LOST, SelfCost
from tests.small_runs import quiet

SLOW_S = 0.2


def _ranks(model: nn.Module, steps: int, folder: Path, **settings: Any) -> Mapping[str, Any]:
    """Train, waiting for the evaluation of each observation; return the ranks of the last record.

    No evaluation runs beside a later step.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with distmon.attach(model, optimizer, quiet(folder, **settings)) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            record = monitor.last_record
    assert record is not None
    return record.ranks


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (block_hooks, "_carries_gradient"),
        (ForwardInputs, "_read_hash"),
        (BackwardPasses, "_see"),
    ],
)
def test_the_time_of_hooks_in_forward_and_backward_is_part_of_the_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    before = getattr(owner, name)
    slow = []

    def slowly(*args: Any) -> Any:
        slow.append(time.sleep(SLOW_S))
        return before(*args)

    monkeypatch.setattr(owner, name, slowly)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    ranks = _ranks(nn.Sequential(*blocks), 4, tmp_path, interval=2)
    assert ranks["monitor_seconds"][0] >= SLOW_S * len(slow) / 2  # two steps were observed
    assert slow


def test_what_is_lost_is_more_than_the_time_of_the_thread_and_waiting_is_no_loss() -> None:
    clock = [0.0]
    hooks = [0.0]
    cost = SelfCost(Budget(None, 10, 60.0), lambda: clock[0], lambda: hooks[0])
    begin, clock[0], hooks[0] = cost.now(), 3.0, 1.0
    cost.add_call(begin)
    cost.add_idle(1.0)
    taken = cost.take(waited=2.0)
    assert taken["monitor_seconds"] == pytest.approx(LOST * 3.0 + 2.0, abs=0.5)  # and its threads
    assert taken["monitor_step_seconds"] == LOST * 1.0


def test_a_call_that_compiled_code_times_counts_once() -> None:
    clock, lane = [0.0], [(5.0, 3.5)]
    cost = SelfCost(Budget(None, 10, 60.0), lambda: clock[0])
    timed = cost.lane = mock.Mock(take_call_seconds=lambda: lane.pop() if lane else (0.0, 0.0))
    begin, clock[0] = cost.now(), 3.0
    cost.add_call(begin)
    timed.call_is_idle.assert_not_called()
    cost.add_call(begin, idle=True)
    timed.call_is_idle.assert_called_once_with()
    taken = cost.take(waited=0.0)
    assert taken["monitor_seconds"] == pytest.approx(LOST * 5.0, abs=0.5)
    assert taken["monitor_step_seconds"] == LOST * 3.5
    assert cost.take(waited=0.0)["monitor_seconds"] < 0.5


def test_functions_of_the_user_in_an_observed_step_count_in_no_record() -> None:
    clock = [0.0]
    cost = SelfCost(Budget(None, 10, 60.0), lambda: clock[0])
    begin, clock[0] = cost.now(), 1.0
    users, clock[0] = cost.now(), 11.0
    cost.exclude_since(users)
    assert cost.take(waited=0.0)["monitor_seconds"] == pytest.approx(0.0, abs=0.5)  # not below 0
    cost.add_call(begin)
    assert cost.take(waited=0.0)["monitor_seconds"] == pytest.approx(LOST, abs=0.5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_every_step_costs_is_no_cost_of_observing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """With decisions at fixed steps no step is idle in compiled code; a longer interval would not
    make them cheaper, and the budget must not try."""
    before = StepSchedule.advance
    slow = 0.05

    def slowly(schedule: StepSchedule, step: int | None) -> bool:
        time.sleep(slow)
        return before(schedule, step)

    monkeypatch.setattr(StepSchedule, "advance", slowly)
    settings = {"interval": 8, "first_observation": 8, "budget": None, "backend": backend}
    ranks = _ranks(nn.Linear(4, 1), 16, tmp_path, actions={"stop": "critical"}, **settings)
    own, idle = (float(ranks[f"monitor_{name}seconds"][0]) for name in ("", "step_"))
    assert own >= LOST * 8 * slow
    assert idle >= LOST * 7 * slow

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
from distmon import own_threads
from distmon.collect.gradient_gain import block_hooks
from distmon.collect.signals.backward_passes import BackwardPasses
from distmon.collect.signals.forward_inputs import ForwardInputs
from distmon.runtime.budget import Budget
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import LOST, SelfCost
from distmon.runtime.worker import EvaluationWorker
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


@pytest.mark.parametrize("compiled", [False, True])
def test_neither_do_those_in_a_step_between_observations(compiled: bool) -> None:
    """A checkpoint is saved some steps after the observation that has led to it."""
    clock, in_lane = [0.0], [(11.0, 11.0)]
    cost = SelfCost(Budget(None, 10, 60.0), lambda: clock[0])
    if compiled:
        cost.lane = mock.Mock(take_call_seconds=lambda: in_lane.pop() if in_lane else (0.0, 0.0))
    begin, clock[0] = cost.now(), 1.0
    users, clock[0] = cost.now(), 11.0
    cost.exclude_since(users)
    cost.add_call(begin, idle=True)
    taken = cost.take(waited=0.0)
    assert taken["monitor_seconds"] == pytest.approx(LOST, abs=0.5)
    assert taken["monitor_step_seconds"] == pytest.approx(LOST)


@pytest.mark.parametrize("idle", [False, True])
def test_training_loses_no_more_than_a_wait_for_other_ranks(idle: bool) -> None:
    clock = [0.0]
    cost = SelfCost(Budget(None, 10, 60.0), lambda: clock[0])
    begin, clock[0] = cost.now(), 1.0
    waits, clock[0] = cost.now(), 11.0
    cost.waited_since(waits)
    cost.add_call(begin, idle)
    taken = cost.take(waited=0.0)
    assert taken["monitor_seconds"] == pytest.approx(LOST + 10.0, abs=0.5)
    assert taken["monitor_step_seconds"] == pytest.approx(LOST + 10.0 if idle else 0.0)
    assert cost.take(waited=0.0)["monitor_seconds"] < 0.5


def test_the_time_of_threads_is_spread_over_the_steps_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, spent = [100.0], [0.0]
    thread = mock.Mock(cpu_seconds=lambda: spent[0])
    monkeypatch.setattr(own_threads, "_running", [thread])
    costs, taken = own_threads.ThreadCosts(0.25, lambda: clock[0]), list[float]()
    for _ in range(40):
        clock[0] += 0.05
        spent[0] += 0.001
        taken.append(costs.take())
    assert sum(taken) == pytest.approx(spent[0], abs=2 * 0.25 * 0.001 / 0.05)
    assert all(0.0 < each < 0.003 for each in taken[10:])
    clock[0] += 10.0
    spent[0] += 0.5
    assert costs.take() == pytest.approx(0.5, abs=0.01)
    assert costs.take() < 1e-9


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("evaluating", [False, True])
def test_what_every_step_costs_is_no_cost_of_observing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, evaluating: bool
) -> None:
    """With decisions at fixed steps no step is idle in compiled code; a longer interval would not
    make them cheaper, and the budget must not try. Nor where an evaluation is never at its end."""
    if evaluating:
        monkeypatch.setattr(EvaluationWorker, "busy", True)
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

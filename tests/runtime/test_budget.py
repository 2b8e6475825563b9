"""The monitor's own cost, and the interval that keeps it small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from small_runs import quiet, small_model, train

import distmon
from distmon.record.telemetry import ObservationCost, observation_cost
from distmon.runtime.budget import Budget


def _cost(own: float, elapsed: float, in_steps: float = 0.0) -> ObservationCost:
    ranks = {
        "monitor_seconds": np.array([own / 2, own]),
        "monitor_step_seconds": np.array([in_steps / 2, in_steps]),
        "elapsed_seconds": np.full(2, elapsed),
    }
    cost = observation_cost(ranks)
    assert cost is not None
    return cost


@pytest.mark.parametrize(
    ("own", "interval"),
    [(0.05, 100), (0.1, 100), (0.11, 200), (1.0, 1000), (5.0, 5000)],
)
def test_interval_is_stretched_in_whole_multiples(own: float, interval: int) -> None:
    budget = Budget(0.001, 100, settle_s=60)
    change = budget.evaluate(_cost(own, 100.0))
    assert (100 if change is None else change.after) == interval
    assert budget.interval == 100  # until all ranks have agreed


def test_a_short_time_says_nothing() -> None:
    budget = Budget(0.001, 100, settle_s=60)
    assert budget.evaluate(_cost(10.0, 50.0)) is None  # the first observation compiles its kernels
    change = budget.evaluate(_cost(0.0, 50.0))
    assert change is not None
    assert str(change) == (
        "observing costs 10% of the training time, above the 0.1% that `budget` leaves for it: "
        "the interval goes from 100 to 10000 steps (`budget: null` keeps it)"
    )


def test_interval_comes_back_when_the_cost_falls() -> None:
    budget = Budget(0.001, 100, settle_s=0)
    stretch = budget.evaluate(_cost(1.0, 100.0))
    assert stretch is not None
    assert stretch.after == 1000
    budget.adopt(stretch.after)
    assert budget.evaluate(_cost(0.07, 100.0)) is None  # not worth the trouble
    back = budget.evaluate(_cost(0.02, 100.0))
    assert back is not None
    assert (back.before, back.after) == (1000, 200)


@pytest.mark.parametrize(
    ("in_steps", "observing", "interval"),
    [
        (0.02, 0.08, 100),
        (0.04, 0.08, 200),  # 0.06 are left for it
        (0.06, 0.05, 200),
        (0.09, 0.02, 100),  # a quarter of the budget at least
        (5.0, 0.02, 100),
        (5.0, 0.19, 800),
    ],
)
def test_what_every_step_costs_does_not_stretch_the_interval_for_ever(
    in_steps: float, observing: float, interval: int
) -> None:
    budget = Budget(0.001, 100, settle_s=0)
    for _ in range(5):
        times = budget.interval / 100
        change = budget.evaluate(_cost(in_steps + observing / times, 100.0, in_steps))
        if change is not None:
            budget.adopt(change.after)
    assert budget.interval == interval


def test_without_a_budget_the_interval_is_the_users() -> None:
    assert Budget(None, 100, 0).evaluate(_cost(99.0, 100.0)) is None


def _observe_expensively(_: int, __: int, folder: str) -> dict[str, Any]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = quiet(Path(folder), interval=2, budget=1e-5, budget_after_s=0)
    with distmon.attach(model, optimizer, **settings) as monitor:
        records = train(model, optimizer, monitor, range(1, 17))
        state = monitor.state_dict()
    return {
        "steps": [r.step for r in records],
        "stretch": state["cost"]["stretch"],
        "losses": [*records[-1].losses],
    }


def test_all_ranks_stretch_alike_and_lose_no_loss(tmp_path: Path) -> None:
    first, second = run_ranks(_observe_expensively, 2, str(tmp_path))
    assert first == second
    # The first record has no step time yet; a change is proposed with the record after that which
    # asks for it, acknowledged with the next one, and in effect after the third.
    assert first["stretch"] >= 500
    assert first["steps"] in ([2, 4, 6, 8], [2, 4, 6, 8, 10])

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
from distmon.record.record import ParamTable, Record
from distmon.runtime.budget import Budget


def _record(own: float, elapsed: float, in_steps: float = 0.0) -> Record:
    ranks = {
        "monitor_seconds": np.array([own / 2, own]),
        "monitor_step_seconds": np.array([in_steps / 2, in_steps]),
        "elapsed_seconds": np.full(2, elapsed),
    }
    return Record(step=1, time=0, world_size=2, metrics={}, params=ParamTable.empty(), ranks=ranks)


@pytest.mark.parametrize(
    ("own", "interval"),
    [(0.05, 100), (0.1, 100), (0.11, 200), (1.0, 1000), (5.0, 5000)],
)
def test_interval_is_stretched_in_whole_multiples(own: float, interval: int) -> None:
    budget = Budget(0.001, 100, settle_s=60)
    change = budget.evaluate(_record(own, 100.0))
    assert budget.interval == interval
    assert (change is None) == (interval == 100)


def test_a_short_time_says_nothing() -> None:
    budget = Budget(0.001, 100, settle_s=60)
    assert (
        budget.evaluate(_record(10.0, 50.0)) is None
    )  # the first observation compiles its kernels
    change = budget.evaluate(_record(0.0, 50.0))
    assert change is not None
    assert str(change) == (
        "observing costs 10% of the training time, above the 0.1% that the budget leaves for it: "
        "the interval goes from 100 to 10000 steps"
    )


def test_interval_comes_back_when_the_cost_falls() -> None:
    budget = Budget(0.001, 100, settle_s=0)
    budget.evaluate(_record(1.0, 100.0))
    assert budget.interval == 1000
    assert budget.evaluate(_record(0.07, 100.0)) is None  # not worth the trouble
    assert budget.evaluate(_record(0.02, 100.0)) is not None
    assert budget.interval == 200


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
        budget.evaluate(_record(in_steps + observing / times, 100.0, in_steps))
    assert budget.interval == interval


def test_without_a_budget_the_interval_is_the_users() -> None:
    assert Budget(None, 100, 0).evaluate(_record(99.0, 100.0)) is None


def _observe_expensively(_: int, __: int, folder: str) -> dict[str, Any]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = quiet(Path(folder), interval=2, budget=1e-5, budget_after_s=0)
    with distmon.attach(model, optimizer, **settings) as monitor:
        records = train(model, optimizer, monitor, range(1, 13))
        state = monitor.state_dict()
    return {
        "steps": [r.step for r in records],
        "stretch": state["cost"]["stretch"],
        "losses": [*records[-1].losses],
    }


def test_all_ranks_stretch_alike_and_lose_no_loss(tmp_path: Path) -> None:
    first, second = run_ranks(_observe_expensively, 2, str(tmp_path))
    assert first == second
    # The first record has no step time yet, so it takes two to change the interval.
    assert first["stretch"] >= 500
    assert first["steps"] in ([2], [2, 4])

"""The share of the weights that decay takes in one step, by optimizer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import distmon
from distmon.collect.ownership import decay_per_step


def _one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("optimizer", "share"),
    [
        (torch.optim.AdamW(_one(), lr=0.01, weight_decay=2.0), 0.02),
        (torch.optim.SGD(_one(), lr=0.1, weight_decay=0.3), 0.03),
        (torch.optim.NAdam(_one(), lr=0.1, weight_decay=1.0, decoupled_weight_decay=True), 0.1),
        # Divided by the size of the gradient, as all of it.
        (torch.optim.Adam(_one(), lr=0.01, weight_decay=2.0), 0.0),
        (torch.optim.RMSprop(_one(), lr=0.01, weight_decay=2.0), 0.0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_decay_takes(optimizer: torch.optim.Optimizer, share: float) -> None:
    assert decay_per_step([optimizer]) == pytest.approx(share)


def test_it_is_the_truth_for_a_gradient_of_zero() -> None:
    (held,) = _one()
    optimizer = torch.optim.AdamW([held], lr=0.01, weight_decay=2.0)
    held.grad = torch.zeros(3)
    optimizer.step()
    assert held[0].item() == pytest.approx(1 - decay_per_step([optimizer]))


def test_the_largest_group_counts_and_nothing_is_unknown() -> None:
    groups = [{"params": _one(), "weight_decay": 0.0}, {"params": _one(), "weight_decay": 5.0}]
    assert decay_per_step([torch.optim.AdamW(groups, lr=0.01)]) == pytest.approx(0.05)
    assert math.isnan(decay_per_step([]))


def test_it_is_in_the_record(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=3.0)
    settings = {"run_dir": tmp_path / "run", "interval": 1, "sinks": [], "writer": "thread"}
    with distmon.attach(model, optimizer, settings) as monitor:
        for _ in range(3):  # hooks are armed by the step before
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            monitor.step(loss=1.0)
        record = monitor.last_record
    assert record is not None
    assert record.ranks["decay_per_step"][0] == pytest.approx(0.03)

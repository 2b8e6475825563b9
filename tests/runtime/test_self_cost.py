"""What a record says of the monitor's own time: its hooks in the passes of a step included."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distmon
from distmon.collect.gradient_gain import block_hooks
from distmon.collect.signals.backward_passes import BackwardPasses
from distmon.collect.signals.forward_inputs import ForwardInputs
from tests.small_runs import quiet

SLOW_S = 0.2


def _own_seconds(tmp_path: Path) -> float:
    """Train with an observation every two steps; return what the second one took."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with distmon.attach(model, optimizer, quiet(tmp_path, interval=2)) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        record = monitor.last_record
    assert record is not None
    return float(record.ranks["monitor_seconds"][0])


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
    assert _own_seconds(tmp_path) >= SLOW_S * len(slow) / 2  # two steps were observed
    assert slow

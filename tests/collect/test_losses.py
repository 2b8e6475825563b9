"""The losses between two observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import observe

from distmon.collect.losses import LossRing
from distmon.runtime.observer import MOST_LOSSES

CPU = torch.device("cpu")


@pytest.mark.parametrize("on_host", [True, False])
def test_a_full_ring_keeps_the_newest(on_host: bool) -> None:
    ring = LossRing(3, CPU, on_host)
    for step in range(1, 6):
        ring.add(step, None if step == 4 else torch.tensor(10.0 * step))
    assert ring.to_list() == [(3, 30.0), (4, None), (5, 50.0)]
    steps, values, given = ring.take()
    assert (steps, given.tolist()) == ([3, 4, 5], [1.0, 0.0, 1.0])
    assert values.tolist()[::2] == [30.0, 50.0]
    ring.add(6, 60.0)
    assert ring.to_list() == [(6, 60.0)]


@pytest.mark.parametrize("on_host", [True, False])
def test_a_restored_ring_has_its_losses_at_the_same_places(on_host: bool) -> None:
    """As a stage of a pipeline has it: ranks add their losses by position."""
    ring, restored = LossRing(4, CPU, on_host), LossRing(4, CPU, on_host)
    for step, loss in ((1, None), (2, 20.0), (3, None)):
        ring.add(step, loss)
    restored.restore(ring.to_list())
    assert restored.to_list() == [(1, None), (2, 20.0), (3, None)]
    steps, values, given = restored.take()
    assert (steps, given.tolist()) == ([1, 2, 3], [0.0, 1.0, 0.0])
    assert values.tolist()[1] == 20.0


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("loss", [torch.zeros(2), "low"])
def test_a_loss_that_is_no_number_leaves_the_ring_as_it_was(on_host: bool, loss: Any) -> None:
    ring = LossRing(3, CPU, on_host)
    ring.add(1, 10.0)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        ring.add(2, loss)
    ring.add(3, 30.0)
    assert ring.to_list() == [(1, 10.0), (3, 30.0)]


def test_an_endless_interval_needs_no_memory(tmp_path: Path) -> None:
    assert MOST_LOSSES < 10**9
    assert observe(tmp_path, steps=3, interval=10**9) == []

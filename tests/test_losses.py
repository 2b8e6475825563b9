"""The losses between two observations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import observe

from distmon.losses import LossRing
from distmon.observer import MOST_LOSSES

CPU = torch.device("cpu")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_full_ring_keeps_the_newest(on_device: bool) -> None:
    ring = LossRing(3, CPU)
    if on_device:  # the buffer that an accelerator would have
        ring._device_values = torch.zeros(3, dtype=torch.float64)
    for step in range(1, 6):
        ring.add(step, None if step == 4 else torch.tensor(10.0 * step))
    assert ring.to_list() == [(3, 30.0), (5, 50.0)]
    steps, values, given = ring.take()
    assert (steps, given.tolist()) == ([3, 4, 5], [1.0, 0.0, 1.0])
    assert values.tolist()[::2] == [30.0, 50.0]
    ring.add(6, 60.0)
    assert ring.to_list() == [(6, 60.0)]


def test_an_endless_interval_needs_no_memory(tmp_path: Path) -> None:
    assert MOST_LOSSES < 10**9
    assert observe(tmp_path, steps=3, interval=10**9) == []

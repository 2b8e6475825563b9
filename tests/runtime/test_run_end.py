"""How a run ends: what is pending is recorded, and nothing is waited for without a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import quiet, small_model, train

import distmon
from distmon.collect.losses import Arriving, LossRing
from distmon.runtime import run_end


class _Never(Arriving):
    """A number on a device that is stuck, as in a collective that other ranks do not enter."""

    def there(self) -> bool:
        return False

    def read(self) -> float:
        raise AssertionError("close waits for a device that is stuck")


def test_close_drops_what_a_stuck_device_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_end, "DEVICE_S", 0.0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10)) as monitor:
        train(model, optimizer, monitor, range(1, 4))
        monitor.evaluated(val_loss=1.5)
        ring = monitor.cycle.observer.losses
        ring._kept[-1] = (3, True, _Never(0.0))
    run = distmon.read_run(tmp_path / "run")
    (rest,) = run.records
    assert rest["loss_steps"] == [1, 2]
    assert rest["faults"] == ["1 losses up to step 3 are lost: the device did not finish in time"]
    assert rest["evaluations"]


def test_a_ring_of_a_device_is_dropped_without_reading_it() -> None:
    ring: Any = LossRing(4, torch.device("cpu"), on_host=False)
    ring.add(1, 10.0)
    ring.add(2, 20.0)
    assert ring.drop_absent() == 2
    ring._device_values = torch.empty(0)  # too small for what is kept
    assert ring.to_list() == [(1, None), (2, None)]

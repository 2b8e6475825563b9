"""A disabled monitor is a null object with the protocol of a monitor."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import distmon
from distmon.monitor import Monitor
from distmon.runtime.disabled import DisabledMonitor

PARTS = {"schedule", "cycle", "finite_watch", "telemetry", "cost"}
"""For tools and tests; a training loop does not use them."""
PUBLIC = [
    name
    for name, member in vars(Monitor).items()
    if not name.startswith("_") and (callable(member) or isinstance(member, property))
    if name not in PARTS
]


@pytest.mark.parametrize("name", [*PUBLIC, "enabled", "__enter__", "__exit__"])
def test_it_has_the_protocol_of_a_monitor(name: str) -> None:
    theirs, ours = getattr(Monitor, name), getattr(DisabledMonitor, name)
    if callable(theirs):
        wanted, found = (inspect.signature(each).parameters for each in (theirs, ours))
        assert [*found] == [*wanted]
        assert [p.kind for p in found.values()] == [p.kind for p in wanted.values()]


def test_nothing_is_initialized_by_halves() -> None:
    assert not issubclass(DisabledMonitor, Monitor)
    assert vars(DisabledMonitor()) == {}


def test_every_call_returns_at_once(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, enabled=False, run_dir=tmp_path / "run") as monitor:
        assert not monitor.enabled
        monitor.install_hooks()
        monitor.install_model_hooks([model])
        with monitor.phase("data"):
            monitor.task_losses({})
        monitor.check(loss=float("nan"), grad_norm=float("inf"))
        monitor.before_step(optimizer)
        monitor.after_step()
        monitor.step(loss=1.0, tokens=1, samples=1, lr=0.1, grad_norm=1.0, step=3)
        monitor.evaluated(val_loss=1.0, train_loss=1.0, epoch=1)
        monitor.load_state_dict(monitor.state_dict())
        assert monitor.last_record is None
        assert monitor.state_dict() == {}
    assert not optimizer._optimizer_step_pre_hooks
    assert not (tmp_path / "run").exists()

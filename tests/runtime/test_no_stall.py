"""The training thread never waits: no host synchronisation, no copy of a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import batch, quiet, small_model
from torch.utils._python_dispatch import TorchDispatchMode

import distmon

# What reads a value back to Python, and what has to know one to size its result.
WAITING = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "unique",
    "masked_select",
)


class Watcher(TorchDispatchMode):
    """Notes the operations that would wait on a GPU, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.waits.append(name)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > self.largest:
            owner = result.untyped_storage().data_ptr()
            given = [a for a in args if isinstance(a, torch.Tensor)]
            if all(a.untyped_storage().data_ptr() != owner for a in given):
                self.largest = result.numel()
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_wait_between_or_during_observations(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small_model(width=4000).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    largest_parameter = max(p.numel() for p in model.parameters())
    watcher = Watcher()
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=3)) as monitor:
        for step in range(1, 10):
            optimizer.zero_grad()
            loss = model(batch(step).to(dtype)).square().mean()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            with watcher:
                monitor.check(grad_norm=norm)
                monitor.before_step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
            with watcher:
                monitor.after_step()
                monitor.step(loss=loss, tokens=16)
        assert monitor.last_record is not None
        assert monitor.last_record.step == 9
        assert monitor.last_record.metrics["monitor/update_ratio_median"] > 0
    assert watcher.waits == []
    # Samples of six parameters fit; a copy of the largest parameter would be 256 000 elements.
    assert watcher.largest < largest_parameter / 4


def test_the_watcher_sees_a_wait() -> None:
    watcher = Watcher()
    with watcher:
        torch.ones(3).sum().item()
        torch.ones(1000, 1000).clone()
    assert watcher.waits == ["_local_scalar_dense"]
    assert watcher.largest == 10**6


def test_nothing_is_read_off_the_interval(tmp_path: Path) -> None:
    """Off observed steps the hooks compare an integer and `step` keeps a loss: no tensor work."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    calls: list[str] = []

    class Any_(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=50)) as monitor:
        loss = torch.tensor(2.0)
        monitor.step(loss=loss)  # the first step of all agrees on its number with the other ranks
        for _ in range(20):
            with Any_():
                monitor.before_step(optimizer)
                monitor.after_step(optimizer)
                monitor.step(loss=loss, tokens=5)
    assert set(calls) <= {"detach", "alias"}

"""The clock around hooks: it counts theirs, in forward and backward, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distmon.bench.contenders import hook_clock
from distmon.bench.contenders.hook_clock import HookClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands until a test moves it."""
    found = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(hook_clock, "time", SimpleNamespace(perf_counter=lambda: found.seconds))
    return found


def test_hooks_are_timed_and_the_rest_is_not(now: SimpleNamespace) -> None:
    def takes(seconds: float) -> None:
        now.seconds += seconds

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    block = model[1]
    block.register_forward_pre_hook(lambda *_: takes(1000))  # somebody else's
    clock = HookClock([block])

    def before(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        takes(1)
        args[0].register_hook(lambda _: takes(10))

    def after(_: nn.Module, _args: object, output: torch.Tensor) -> None:
        takes(2)
        output.register_hook(lambda _: takes(20))

    with clock.around():
        handles = [
            block.register_forward_pre_hook(before, prepend=True),
            block.register_forward_hook(after),
        ]
    loss = model(torch.ones(2, 3)).sum()
    assert clock.seconds == 3
    takes(1000)
    loss.backward()
    assert clock.seconds == 33
    clock.remove()
    for handle in handles:
        handle.remove()
    model(torch.ones(2, 3)).sum().backward()
    assert clock.seconds == 33

"""Copies and files of a model that is being monitored belong to no monitor."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import quiet, train
from torch import nn

import distmon


class Stack(nn.Module):
    """A model with blocks, so that all kinds of hooks are on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert b"distmon" not in file.getvalue()
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "make_copy",
    [_saved, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["torch.save", "deepcopy", "pickle"],
)
def test_a_copy_made_while_attached_is_clean(
    tmp_path: Path, make_copy: Callable[[nn.Module], nn.Module]
) -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        # With and without user's own hooks beside those of the monitor, whose handles are held.
        handle = model.blocks[0].register_forward_hook(print)
        copied = make_copy(model)
        handle.remove()
        copied.blocks[0]._forward_hooks.popitem()
        before = [p.clone() for p in copied.parameters()]
        records = train(model, optimizer, monitor, range(1, 3))
        x = torch.randn(4, 32)
        copied(x).sum().backward()  # a copy can be trained, and nobody measures it
        again = train(model, optimizer, monitor, range(3, 5))
    assert [r.step for r in (*records, *again)] == [1, 2, 3, 4]
    assert records[0].gradient_gain is not None
    assert all(torch.equal(a, b) for a, b in zip(before, copied.parameters(), strict=True))
    assert not model.blocks[0]._forward_hooks


def test_a_saved_model_loads_where_distmon_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **quiet(tmp_path)):
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['distmon'] = None; import torch; "
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
        "(torch.ones(1, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([1, 4])", done.stderr


def test_attaching_again_closes_the_old_monitor_of_the_model(tmp_path: Path) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = distmon.attach(model, optimizer, **quiet(tmp_path / "first"))
    train(model, optimizer, first, range(1, 3))
    second = distmon.attach(model, optimizer, **quiet(tmp_path / "second"))
    assert first.closed
    assert not second.closed
    train(model, optimizer, second, range(1, 3))
    second.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not model._forward_pre_hooks


def test_two_models_keep_their_monitors(tmp_path: Path) -> None:
    models = [Stack(), Stack()]
    monitors = [
        distmon.attach(model, torch.optim.SGD(model.parameters()), **quiet(tmp_path / str(number)))
        for number, model in enumerate(models)
    ]
    assert [monitor.closed for monitor in monitors] == [False, False]
    for monitor in monitors:
        monitor.close()

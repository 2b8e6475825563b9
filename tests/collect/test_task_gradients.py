"""Gradient norms of tasks on shared parameters: right, over ranks, and without a trace."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import batch, quiet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distmon
from distmon import Record
from distmon.record.tasks import task_ratios

GLOBAL_BATCH = 8


class TwoHeads(nn.Module):
    """A trunk that both tasks use and a head of its own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 16))
        self.pointer, self.kind = nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = self.trunk(x)
        return self.pointer(shared), self.kind(shared)


def _losses(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    pointer, kind = model(x)
    return {"pointer": pointer.square().mean(), "kind": 10 * kind.square().mean()}


def _train(rank: int, world: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TwoHeads()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    truth, grads, records = [], [], []
    settings = quiet(Path(folder), interval=2, task_interval=2)
    with distmon.attach(wrapped, optimizer, **settings) as monitor:
        for step in range(1, 6):
            whole = batch(step, GLOBAL_BATCH)
            part = GLOBAL_BATCH // world
            losses = _losses(wrapped, whole[rank * part : (rank + 1) * part])
            truth.append(_true_norms(model, whole))
            monitor.task_losses(losses)
            assert all(p.grad is None for p in model.parameters())
            sum(losses.values()).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=sum(losses.values()).detach())
            records.append(monitor.last_record)
    return {"truth": truth, "grads": grads, "tasks": [r and dict(r.tasks) for r in records]}


def _true_norms(model: TwoHeads, whole: torch.Tensor) -> dict[str, float]:
    found = {}
    for name, loss in _losses(model, whole).items():
        grads = torch.autograd.grad(loss, [*model.trunk.parameters()], retain_graph=True)
        found[name] = torch.cat([g.flatten() for g in grads]).double().norm().item()
    return found


def _check(result: dict[str, Any]) -> None:
    assert [bool(t) for t in result["tasks"]] == [False, True, True, True, True]
    for step in (2, 4):
        expected, found = result["truth"][step - 1], result["tasks"][step - 1]
        assert found.keys() == expected.keys()
        for name in found:  # a parameter of 768 elements is sampled, the others are whole
            assert found[name] == pytest.approx(expected[name], rel=0.2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _train(0, 1, str(tmp_path_factory.mktemp("alone")))


def test_norms_are_those_of_the_shared_parameters(alone: dict[str, Any]) -> None:
    _check(alone)


def test_training_is_not_disturbed(alone: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, 6):
        sum(_losses(model, batch(step, GLOBAL_BATCH)).values()).backward()
        for mine, theirs in zip(model.parameters(), alone["grads"][step - 1], strict=True):
            assert torch.equal(mine.grad, theirs)
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_agree_with_one_process(alone: dict[str, Any], tmp_path: Path) -> None:
    """The norm is that of the mean gradient, which is less than the mean of the ranks' norms."""
    first, second = run_ranks(_train, 2, str(tmp_path))
    assert first["tasks"] == second["tasks"]
    for mine, theirs in zip(first["tasks"], alone["tasks"], strict=True):
        assert (mine or {}) == pytest.approx(theirs or {}, rel=1e-4)


def test_what_cannot_be_measured_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        caplog.at_level(logging.WARNING, "distmon"),
        distmon.attach(model, optimizer, **quiet(tmp_path, task_interval=1)) as monitor,
    ):
        for step in range(1, 5):
            losses = _losses(model, batch(step))
            monitor.task_losses({"pointer": losses["pointer"]})
            sum(losses.values()).backward()
            optimizer.step()
            monitor.step()
        assert isinstance(monitor.last_record, Record)
        assert monitor.last_record.tasks == {}
    assert [r.getMessage() for r in caplog.records if "task_losses" in r.getMessage()] == [
        "distmon: task_losses failed on rank 0 (DistmonError: task_losses takes "
        "2 to 16 losses, not 1); continuing without it"
    ]


def test_ratio_is_against_the_mean_of_the_others() -> None:
    assert task_ratios({"a": 4.0, "b": 1.0, "c": 3.0}) == {"a": 2.0, "b": 1 / 3.5, "c": 3 / 2.5}
    assert task_ratios({"a": 4.0, "b": 2.0}) == {"a": 2.0, "b": 0.5}

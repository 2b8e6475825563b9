"""Loops as people write them, watched without their help, in this process."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import batch, small_model
from started_scripts import records
from torch import nn

from distmon.config import load_config
from distmon.integrations.launcher.command import BOOTSTRAP, VARIABLE, leave_children_alone
from distmon.integrations.launcher.training_watch import TrainingWatch


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[TrainingWatch]:
    settings = {"run_dir": tmp_path / "run", "interval": 1, "sinks": ["jsonl"], "budget": None}
    watch = TrainingWatch(load_config(settings))
    watch.begin()
    yield watch
    watch.close()


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seen(folder: Path) -> dict[int, float]:
    """Loss of each step in the records."""
    return {r["step"]: r["metrics"]["train/step_loss"] for r in records(folder)}


def expected(losses: list[float], first: int = 1) -> Any:
    return pytest.approx(dict(enumerate(losses, first)), rel=1e-6)


def test_a_loss_that_is_not_found_is_said_once(
    watch: TrainingWatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        loss = model(batch(step)).square().mean()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    said = [each.message for each in caplog.records if "no loss was found" in each.message]
    assert len(said) == 1
    assert watch.monitors
    other = small_model()
    train(other, torch.optim.SGD(other.parameters(), lr=0.01), 30)
    assert len([each for each in caplog.records if "no loss" in each.message]) == 1


def test_a_rebuilt_optimizer_continues_the_run(watch: TrainingWatch, tmp_path: Path) -> None:
    model = small_model()
    *body, head = model.parameters()
    losses = train(model, torch.optim.Adam([head], lr=0.01), 3)
    losses += train(model, torch.optim.Adam(model.parameters(), lr=0.01), 3)
    losses += train(model, torch.optim.SGD(body, lr=0.01), 2)
    assert len(watch.monitors) == 1
    watch.close()
    assert seen(tmp_path / "run") == expected(losses)
    assert os.listdir(tmp_path) == ["run"], "the same model, the same folder"
    found = records(tmp_path / "run")
    assert all(record["applied"] for record in found)
    ratios = [record["metrics"]["monitor/update_ratio_min"] for record in found]
    assert min(ratios) > 0, "what the current optimizer trains is measured"


def test_models_trained_one_after_another_are_not_kept(
    watch: TrainingWatch, tmp_path: Path
) -> None:
    gone, losses = [], []
    for _ in range(2):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses.append(train(model, optimizer, 2))
        gone.append(weakref.ref(next(model.parameters())))
        del model, optimizer
        deadline = time.monotonic() + 60
        while watch.monitors and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
    assert not watch.monitors
    while any(each() is not None for each in gone) and time.monotonic() < deadline:
        gc.collect()  # the thread that closes the monitor is at its end
        time.sleep(0.01)
    assert [each() for each in gone] == [None, None]
    assert seen(tmp_path / "run") == expected(losses[0])
    assert seen(tmp_path / "run-model2") == expected(losses[1])


class SharpnessAware(torch.optim.Optimizer):
    """Two backward passes a step; the gradients of the first one are cleared."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.base = torch.optim.SGD(self.param_groups, lr=0.01)

    def climb(self) -> None:
        self.zero_grad()

    def descend(self) -> None:
        self.base.step()
        self.zero_grad()


def test_a_step_has_the_loss_whose_gradients_it_takes(watch: TrainingWatch, tmp_path: Path) -> None:
    model = small_model()
    optimizer = SharpnessAware(model.parameters())
    losses = []
    for step in range(4):
        (model(batch(step)).square().mean() * 100).backward()
        optimizer.climb()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.descend()
        losses.append(loss.item())
    watch.close()
    assert seen(tmp_path / "run") == expected(losses), "all, though one optimizer never steps"


def test_an_optimizer_with_rare_steps_is_not_waited_for(
    watch: TrainingWatch, tmp_path: Path
) -> None:
    model = small_model()
    often = torch.optim.SGD([*model.parameters()][:3], lr=0.01)
    rarely = torch.optim.SGD([*model.parameters()][3:], lr=0.01)
    for step in range(10):
        model(batch(step)).square().mean().backward()
        often.step()
        if step % 5 == 4:
            rarely.step()
        model.zero_grad()
    watch.close()
    assert [*seen(tmp_path / "run")] == [*range(1, 11)]
    assert all(record["applied"] for record in records(tmp_path / "run")), "none was skipped"


def test_steps_of_a_resumed_training_are_numbered_on(watch: TrainingWatch, tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    model2, state = small_model(), optimizer.state_dict()
    optimizer2 = torch.optim.AdamW(model2.parameters(), lr=0.01)
    optimizer2.load_state_dict(state)
    losses = train(model2, optimizer2, 2)
    watch.close()
    assert seen(tmp_path / "run-model2") == expected(losses, first=4)


@pytest.mark.parametrize("deep", [False, True])
def test_each_parameter_may_have_an_optimizer_of_its_own(
    watch: TrainingWatch, tmp_path: Path, deep: bool
) -> None:
    model = small_model()
    if deep:  # so many optimizers that they are measured together, when most gradients are freed
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    own = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    squares: list[float] = []

    def step_in_backward(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        squares.append(float(parameter.grad.double().square().sum()))
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_in_backward)
    losses, norms = [], []
    for step in range(3):
        squares.clear()
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(sum(squares) ** 0.5)
    watch.close()
    assert seen(tmp_path / "run") == expected(losses)
    found = [r["metrics"] for r in records(tmp_path / "run")]
    assert all(metrics["monitor/update_ratio_min"] > 0 for metrics in found)
    if deep:
        assert not any("monitor/grad_norm" in metrics for metrics in found), "missing, not wrong"
    else:
        measured = [metrics["monitor/grad_norm"] for metrics in found]
        assert measured == pytest.approx(norms, rel=1e-5)


def test_the_norm_that_fsdp1_clips_by_is_the_one_before_clipping(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    settings = {"run_dir": tmp_path / "run", "interval": 1, "sinks": ["jsonl"], "budget": None}
    watch = TrainingWatch(load_config(settings))
    watch.begin()
    try:
        device = torch.device("cpu")
        model = FullyShardedDataParallel(small_model(), device_id=device, use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(batch(0)).square().mean().backward()
        norm = float(model.clip_grad_norm_(1e-3))
        optimizer.step()
    finally:
        dist.destroy_process_group()
    (found,) = [r["metrics"]["monitor/grad_norm"] for r in records(tmp_path / "run")]
    assert found == pytest.approx(norm, rel=1e-6)
    assert norm > 0.01


def test_processes_that_a_training_starts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "{}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BOOTSTRAP), "mine"]))
    leave_children_alone()
    assert (os.environ.get(VARIABLE), os.environ["PYTHONPATH"]) == (None, "mine")
    monkeypatch.setenv(VARIABLE, "{}")
    monkeypatch.setenv("PYTHONPATH", str(BOOTSTRAP))
    leave_children_alone()
    assert "PYTHONPATH" not in os.environ

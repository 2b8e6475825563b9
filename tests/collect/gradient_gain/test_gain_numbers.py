"""Gains against plain autograd, and against what is known by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gain_models import (
    WIDTH,
    Block,
    ByKeyword,
    Checkpointed,
    CheckpointedReentrant,
    InPlace,
    Net,
    ResidualOutside,
    data,
    gains_by_autograd,
    loss_of,
    train,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import distmon
from distmon import Monitor
from distmon.collect.gradient_gain import BackwardNorms, Blocks, backward_norms
from distmon.collect.gradient_gain.block_hooks import BlockHooks
from distmon.collect.gradient_gain.rows import Switch


def _attach(
    model: nn.Module, folder: Path, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> tuple[Monitor, torch.optim.Optimizer]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"run_dir": folder / "run", "sinks": ["jsonl"], "interval": 1, **more}
    return distmon.attach(model, optimizer, **settings), optimizer


def test_a_chain_whose_gains_are_known(tmp_path: Path) -> None:
    """Orthogonal maps times a factor: the gradient grows by just that factor."""

    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.map = nn.Parameter(factor * torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.map

    torch.manual_seed(0)
    factors = [0.5, 2.0, 1.0, 4.0]
    chain = nn.Sequential(*map(Scaled, factors))
    monitor, optimizer = _attach(chain, tmp_path)
    with monitor:
        x = torch.randn(5, WIDTH, requires_grad=True)
        output = chain(x)
        output.square().sum().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.gradient_gain is not None
    assert record.gradient_gain.blocks == ("0", "1", "2", "3")
    assert record.gradient_gain.gain == pytest.approx(factors, rel=1e-5)
    last = 2 * float(output.detach().norm())
    assert record.gradient_gain.output_norm[-1] == pytest.approx(last, rel=1e-5)
    assert record.gradient_gain.input_norm[0] == pytest.approx(last * math.prod(factors), rel=1e-5)
    mean = (2.0 + 1.0 + 4.0) / 3  # without the first, which normalises an embedding in real models
    assert record.metrics["gradient_monitor/mean_gain"] == pytest.approx(mean, rel=1e-5)
    assert record.metrics["gradient_monitor/amplification"] == pytest.approx(mean**4, rel=1e-5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "kind", [Net, Checkpointed, CheckpointedReentrant, ResidualOutside, ByKeyword]
)
def test_gains_are_those_of_autograd(kind: type[Net], backend: str, tmp_path: Path) -> None:
    model = kind()
    plain = Net if issubclass(kind, Checkpointed) else kind
    monitor, optimizer = _attach(model, tmp_path, interval=2, backend=backend)
    with monitor:
        for step in (1, 2, 3, 4):
            reference = plain()
            reference.load_state_dict(model.state_dict())
            expected = gains_by_autograd(reference, data(step))
            (record,) = train(model, monitor, optimizer, range(step, step + 1)) or [None]
            assert (record is None) == (step == 1)
            if step % 2 == 0:
                assert record is not None
                assert record.gradient_gain is not None
                assert record.gradient_gain.blocks == ("blocks.0", "blocks.1", "blocks.2")
                assert record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)
    assert not model.blocks[0]._forward_hooks
    assert not model.blocks[0]._forward_pre_hooks


def test_micro_batches_make_one_batch(tmp_path: Path) -> None:
    model = Net()
    expected = gains_by_autograd(model, data(1), data(2))
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        for step in (1, 2):
            (loss_of(model, data(step)) / 2).backward()
        optimizer.step()
        monitor.step()
        assert monitor.last_record is not None
        assert monitor.last_record.gradient_gain is not None
        assert monitor.last_record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)


def test_a_block_that_works_in_place_is_still_trained(tmp_path: Path) -> None:
    model = Net(block=InPlace)
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        (record,) = train(model, monitor, optimizer, range(1, 2))
    assert record.faults == ()
    assert np.isfinite(record.gradient_gain.gain).all()


def test_what_is_changed_between_two_blocks_has_two_gradients(tmp_path: Path) -> None:
    """The tensor that leaves one block enters the next, with other numbers in it."""

    class Tripled(Net):
        def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = block(x)
            return output.mul_(3)

    model = Tripled()
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        (record,) = train(model, monitor, optimizer, range(1, 2))
    left, entered = record.gradient_gain.output_norm, record.gradient_gain.input_norm
    assert left[:-1] == pytest.approx(3 * entered[1:], rel=1e-5)


def test_two_monitors_observe_the_same_blocks(tmp_path: Path) -> None:
    model = Net()
    every, optimizer = _attach(model, tmp_path / "every")
    around = nn.ModuleDict({"net": model})  # a second monitor of the same module closes the first
    second, _ = _attach(around, tmp_path / "second", optimizer, interval=2)
    with every, second:
        for step in (1, 2, 3):
            expected = gains_by_autograd(model, data(step))
            loss_of(model, data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for monitor in (every, second):
                monitor.step()
            assert every.last_record is not None
            assert every.last_record.gradient_gain is not None
            assert every.last_record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)
            if step == 2:
                assert second.last_record is not None
                assert second.last_record.gradient_gain is not None
                assert second.last_record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)


def test_no_gradient_before_the_first_block(tmp_path: Path) -> None:
    model = Net()
    model.embed.requires_grad_(False)
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        (record,) = train(model, monitor, optimizer, range(1, 2))
    assert np.isnan(record.gradient_gain.gain[0])
    assert np.isfinite(record.gradient_gain.output_norm).all()
    expected = record.gradient_gain.gain[1:].mean()
    assert record.metrics["gradient_monitor/mean_gain"] == pytest.approx(expected)


def test_bfloat16_gradients_are_summed_in_more_digits(tmp_path: Path) -> None:
    """Norms of 0.1% more than bfloat16 can tell apart."""
    model = Net().bfloat16()
    seen: list[torch.Tensor] = []
    handle = model.blocks[-1].register_forward_hook(
        lambda _, __, output: (
            output.register_hook(lambda g: seen.append(g.double().norm())) and None
        )
    )
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        loss_of(model, data(1).bfloat16()).backward()
        optimizer.step()
        monitor.step()
        assert monitor.last_record is not None
        assert monitor.last_record.gradient_gain is not None
        norm = monitor.last_record.gradient_gain.output_norm[-1]
    handle.remove()
    assert norm == pytest.approx(float(seen[0]), rel=1e-5)


def test_average_and_drift_go_on_after_a_resume(tmp_path: Path) -> None:
    model = Net()
    monitor, optimizer = _attach(model, tmp_path, flow={"window": 4})
    with monitor:
        records = train(model, monitor, optimizer, range(1, 6))
        state = monitor.state_dict()
    gains = [r.metrics["gradient_monitor/mean_gain"] for r in records]
    assert len(set(gains)) == 5
    assert state["cycle"]["record"]["gain"] == gains[1:]
    drifts = [r.metrics.get("gradient_monitor/mean_gain_drift") for r in records]
    assert drifts[:2] == [None, None]
    assert drifts[2] == pytest.approx((gains[2] - gains[0]) / gains[0])
    assert drifts[4] == pytest.approx((gains[4] - gains[1]) / gains[1])
    monitor, optimizer = _attach(model, tmp_path, flow={"window": 3})
    with monitor:
        monitor.load_state_dict(state)
        (record,) = train(model, monitor, optimizer, range(6, 7))
        metrics = record.metrics
    mean = np.mean([*gains[3:], metrics["gradient_monitor/mean_gain"]])
    assert metrics["gradient_monitor/mean_gain_ma"] == pytest.approx(mean)


def test_a_step_that_was_skipped_has_no_flow(tmp_path: Path) -> None:
    model = Net()
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        train(model, monitor, optimizer, range(1, 2))
        loss_of(model, data(2)).backward()
        monitor.step()
        assert monitor.last_record is not None
        assert monitor.last_record.step == 2
        assert monitor.last_record.gradient_gain is None
        optimizer.step()  # without a backward of its own
        monitor.step()
        assert monitor.last_record.step == 3
        assert monitor.last_record.applied
        assert monitor.last_record.gradient_gain is None
        assert "gradient_monitor/mean_gain" not in monitor.last_record.metrics
        (record,) = train(model, monitor, optimizer, range(4, 5))
        assert record.gradient_gain is not None


def test_a_step_that_nobody_expected_has_no_flow(tmp_path: Path) -> None:
    """The trainer's number jumps to an observed one: the hooks did not know."""
    model = Net()
    monitor, optimizer = _attach(model, tmp_path, interval=10)
    with monitor:
        for number in (9, 10, 15, 20):
            loss_of(model, data(number)).backward()
            optimizer.step()
            monitor.step(step=number)
            if number == 10:
                assert monitor.last_record is not None
                assert monitor.last_record.gradient_gain is not None
        assert monitor.last_record is not None
        assert monitor.last_record.step == 20
        assert monitor.last_record.gradient_gain is not None  # 15 + 5 was foreseen
        loss_of(model, data(30)).backward()
        optimizer.step()
        monitor.step(step=39)
        assert monitor.last_record.step == 39
        assert monitor.last_record.gradient_gain is None


def test_rows_of_an_unobserved_step_are_not_sent() -> None:
    """CUDA graphs fill them in every step."""
    chain = nn.Sequential(Block(), Block())
    flow = BackwardNorms(Blocks(("0", "1"), 2), dict(chain.named_children()), torch.device("cpu"))
    sent = torch.full((flow.size,), torch.nan, dtype=torch.float64)
    flow.install()
    flow.arm(True, first=False)
    chain(torch.randn(3, WIDTH)).sum().backward()
    flow.send(sent)
    assert sent.view(2, -1)[:, 2].min() > 0
    flow.arm(False, first=False)
    flow.send(sent)
    assert not sent.any()


def test_a_fault_in_a_hook_does_not_reach_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no norm today")

    model = Net()
    monitor, optimizer = _attach(model, tmp_path, backend="torch")
    monkeypatch.setattr("distmon.collect.gradient_gain.block_hooks.norm_of", broken)
    with monitor:
        (record,) = train(model, monitor, optimizer, range(1, 2))
        assert record.gradient_gain is None
        assert record.params.columns["grad_norm"][0] > 0
        assert "gradient gain failed on rank 0 (RuntimeError: no norm today)" in caplog.text
        monkeypatch.undo()
        (record,) = train(model, monitor, optimizer, range(2, 3))
        assert record.gradient_gain is not None


def test_gradients_of_tasks_are_not_counted(tmp_path: Path) -> None:
    model = Net()
    monitor, optimizer = _attach(model, tmp_path, task_interval=1)
    with monitor:
        train(model, monitor, optimizer, range(1, 2))
        expected = gains_by_autograd(model, data(2))
        output = model(data(2))
        losses = {"a": 5 * output[:, :2].square().mean(), "b": output[:, 2:].mean()}
        monitor.task_losses(losses)
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.tasks
    assert record.gradient_gain is not None
    assert record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)


def test_a_copy_of_the_model_is_not_watched(tmp_path: Path) -> None:
    model = Net()
    expected = gains_by_autograd(model, data(1))
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        average = copy.deepcopy(model)
        output = average.blocks[0](average.embed(data(7)))
        assert not output._backward_hooks
        loss_of(average, data(7)).backward()
        (record,) = train(model, monitor, optimizer, range(1, 2))
    assert record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)


def test_off_observed_steps_no_tensor_is_hooked(tmp_path: Path) -> None:
    model = Net()
    monitor, optimizer = _attach(model, tmp_path, interval=3, backend="torch")
    outputs: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda _, __, output: outputs.append(output))
    with monitor:
        train(model, monitor, optimizer, range(1, 4))
    # One for the block's own output and the next block's input.
    assert [len(each._backward_hooks or {}) for each in outputs] == [0, 0, 1]


def test_blocks_have_no_hooks_in_steps_that_are_not_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have compiled something.
    monkeypatch.setattr(backward_norms, "something_was_compiled", lambda: False)
    model = Net()
    monitor, optimizer = _attach(model, tmp_path, interval=3)
    assert model.blocks[0]._forward_hooks  # the model may be compiled now
    hooked: list[int] = []
    with monitor:
        for step in range(1, 8):
            hooked.append(len(model.blocks[0]._forward_hooks))
            records = train(model, monitor, optimizer, range(step, step + 1))
            if step % 3 == 0:
                assert records[-1].gradient_gain is not None
    assert hooked == [1, 0, 1, 0, 0, 1, 0]


def test_a_hook_neither_waits_nor_copies() -> None:
    made: list[tuple[str, int]] = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not func.is_view:
                made.append((func.overloadpacket.__name__, result.numel()))
            return result

    switch = Switch()
    switch.arm(True)
    hooks = BlockHooks(torch.device("cpu"), switch)
    gradient = torch.randn(1000)
    with Watcher():
        hooks._on_output(gradient)
    assert made == [("linalg_vector_norm", 1), ("hypot_", 1), ("add_", 1)]


def test_a_model_without_blocks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    monitor, optimizer = _attach(model, tmp_path)
    with monitor:
        (record,) = train(model, monitor, optimizer, range(1, 2))
    assert record.gradient_gain is None
    assert record.faults == ()


def test_switched_off(tmp_path: Path) -> None:
    model = Net(block=Block)
    monitor, optimizer = _attach(model, tmp_path, flow={"enabled": False})
    assert not model.blocks[0]._forward_hooks
    with monitor:
        (record,) = train(model, monitor, optimizer, range(1, 2))
    assert record.gradient_gain is None

"""Parameters and optimizers that change after attach: never stale numbers, always a sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_runs import batch, quiet, small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distmon
from distmon import Monitor
from distmon.record.record import Record


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor, count: int
) -> Record:
    for step in range(count):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
    record = monitor.last_record
    assert record is not None
    return record


def _weight_norms(model: nn.Module) -> list[float]:
    return [float(p.detach().double().norm()) for p in model.parameters()]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def test_assigned_weights_are_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    optimizer = _sgd(model)
    with distmon.attach(model, optimizer, **quiet(tmp_path, sample_size="exact")) as monitor:
        _steps(model, optimizer, monitor, 2)
        loaded = {name: 3 * value for name, value in model.state_dict().items()}
        with caplog.at_level(logging.WARNING, "distmon"):
            model.load_state_dict(loaded, assign=True)
            optimizer.param_groups[0]["params"] = [*model.parameters()]
            record = _steps(model, optimizer, monitor, 1)
    assert record.params.columns["weight_norm"] == pytest.approx(_weight_norms(model), rel=1e-6)
    assert np.isfinite(record.params.columns["grad_norm"]).all()
    assert record.params.columns["in_optimizer"].all()
    assert any("was replaced; the new parameter is read" in r.message for r in caplog.records)


def test_assigned_weights_that_no_optimizer_owns_are_named(tmp_path: Path) -> None:
    model = small_model()
    optimizer = _sgd(model)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        _steps(model, optimizer, monitor, 1)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        record = _steps(model, optimizer, monitor, 4)
    assert not record.params.columns["in_optimizer"].any()
    alerts = distmon.read_run(tmp_path / "run").alerts
    assert any(a["rule"] == "frozen" and "optimizer" in a["message"] for a in alerts)


def test_parameters_that_a_functional_call_lends_to_a_module_are_read(tmp_path: Path) -> None:
    """`distmon run` attaches in such a call, where the module has them."""
    model = small_model()
    trained = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(trained.values(), lr=1e-2)
    monitors: list[Monitor] = []

    def attach(module: nn.Module, _: object) -> None:
        settings = quiet(tmp_path, sample_size="exact")
        monitors.append(distmon.attach(module, optimizer, **settings))
        hook.remove()

    hook = model.register_forward_pre_hook(attach)
    for step in range(3):
        optimizer.zero_grad()
        loss = torch.func.functional_call(model, trained, (batch(step),)).square().mean()
        loss.backward()
        optimizer.step()
        monitors[0].step(loss=loss)
    record = monitors[0].last_record
    monitors[0].close()
    assert record is not None
    norms = [float(p.detach().double().norm()) for p in trained.values()]
    assert record.params.columns["weight_norm"] == pytest.approx(norms, rel=1e-6)
    assert (record.params.columns["update_ratio"] > 0).all()


def _replace_head(model: nn.Module) -> None:
    model[2] = nn.Linear(32, 3)


def _remove_head(model: nn.Module) -> None:
    del model[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [(_replace_head, "changed its shape"), (_remove_head, "was removed")],
    ids=["new head", "removed"],
)
def test_what_cannot_be_followed_is_named_and_not_read(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[nn.Module], None],
    words: str,
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = _sgd(model)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        _steps(model, optimizer, monitor, 1)
        change(model)
        with caplog.at_level(logging.WARNING, "distmon"):
            record = _steps(model, optimizer, monitor, 2)
    gone = [name.startswith("2.") for name in record.params.names]
    assert sum(gone) == 2
    assert np.isnan(record.params.columns["weight_norm"][gone]).all()
    assert np.isfinite(record.params.columns["update_ratio"][:2]).all()
    assert not record.faults
    (message,) = [r.message for r in caplog.records if words in r.message]
    assert "attach again" in message


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    model = small_model()
    first, second = _sgd(model), _sgd(model)
    with distmon.attach(model, first, **quiet(tmp_path)) as monitor:
        _steps(model, first, monitor, 2)
        _steps(model, second, monitor, 5)
    alerts = distmon.read_run(tmp_path / "run").alerts
    (found,) = [a for a in alerts if a["rule"] == "steps_skipped"]
    assert "none of the attached optimizers has stepped" in found["message"]
    assert "attach again" in found["advice"][0]


def test_sharded_parameters_are_followed_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not so the unsharded ones that `fully_shard` puts into the module for a while."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = small_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = _sgd(model)
        with distmon.attach(model, optimizer, **quiet(tmp_path, sample_size="exact")) as monitor:
            model.set_reshard_after_backward(False)
            _steps(model, optimizer, monitor, 2)
            model.reshard()
            assert not any("was replaced" in r.message for r in caplog.records)
            loaded = {name: 3 * value for name, value in model.state_dict().items()}
            model.load_state_dict(loaded, assign=True)
            optimizer.param_groups[0]["params"] = [*model.parameters()]
            record = _steps(model, optimizer, monitor, 1)
        model.reshard()
        found = [float(p.detach().to_local().double().norm()) for p in model.parameters()]
    finally:
        dist.destroy_process_group()
    assert record.params.columns["weight_norm"] == pytest.approx(found, rel=1e-6)
    assert np.isfinite(record.params.columns["grad_norm"]).all()
    assert any("was replaced; the new parameter is read" in r.message for r in caplog.records)


def test_a_larger_table_of_embeddings_is_no_reset_of_what_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model = nn.Sequential(nn.Embedding(100, 32), *layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, sample_size="sampled")) as monitor:
        for step in range(8):
            if step == 4:
                model[0].weight = nn.Parameter(torch.randn(110, 32))
                optimizer.param_groups[0]["params"] = [*model.parameters()]
            optimizer.zero_grad()
            model(torch.arange(step, step + 40)).square().mean().backward()
            optimizer.step()
            monitor.step()
    alerts = distmon.read_run(tmp_path / "run").alerts
    assert [a["params"] for a in alerts if a["rule"] == "weights_replaced"] == []
    assert not [r.message for r in caplog.records if "failed" in r.message]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x).relu())


def test_a_parameter_that_is_tied_later_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = _Tied()
    optimizer = _sgd(model)
    with distmon.attach(model, optimizer, **quiet(tmp_path, sample_size="exact")) as monitor:
        _steps(model, optimizer, monitor, 2)
        model.head.weight = model.embed.weight
        optimizer.param_groups[0]["params"] = [*model.parameters()]
        record = _steps(model, optimizer, monitor, 1)
    total = float(model.embed.weight.grad.double().norm())  # type: ignore[union-attr]
    assert record.metrics["monitor/grad_norm"] == pytest.approx(total, rel=1e-6)
    assert np.isnan(record.params.row("head.weight")["grad_norm"])
    (message,) = [r.message for r in caplog.records if "head.weight" in r.message]
    assert "was replaced by embed.weight and is monitored under that name" in message


class _Adapter(nn.Module):
    """What an adapter library puts in the place of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_parameters_that_are_added_later_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = _sgd(model)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        _steps(model, optimizer, monitor, 2)
        model[2] = _Adapter(model[2])
        optimizer.add_param_group({"params": [model[2].down, model[2].up], "lr": 0.1})
        record = _steps(model, optimizer, monitor, 3)
    assert not record.faults
    (message,) = [r.message for r in caplog.records if "after attach" in r.message]
    assert "(2: 2.down, 2.up); they are not monitored" in message
    assert "totals leave them out: attach again" in message


def test_weights_that_an_optimizer_kept_are_not_called_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = _sgd(model)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        _steps(model, optimizer, monitor, 1)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        _steps(model, optimizer, monitor, 2)
    assert not [r.message for r in caplog.records if "after attach" in r.message]

"""The monitor on a device without float64, as Apple's; needs SIMULATED_CUDA_NO_FLOAT64=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distmon
from distmon.device import has_float64, widest_float
from distmon.layout.capture import capture
from distmon.layout.host_copies import copied_to_host
from distmon.probe.backend import choose_probe
from distmon.probe.torch_probe import TorchProbe
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading
from simulated_cuda.device import set_order
from simulated_cuda.observed_training import (
    adamw,
    comparable,
    made_model,
    observe,
    settings,
    train,
)


def close(found: Any, expected: Any) -> None:
    """Compare records: sums of blocks are float32 on such a device."""
    assert [each[0] for each in found] == [each[0] for each in expected]
    for (_, mine, *located), (_, theirs, *other) in zip(found, expected, strict=True):
        assert located == other
        assert mine.keys() <= theirs.keys(), mine.keys() - theirs.keys()
        for name, value in mine.items():
            limit = 1e-5 * max(1e-6, abs(theirs[name]))
            assert abs(value - theirs[name]) <= limit, (name, value, theirs[name])
        for name in ("monitor/grad_norm", "monitor/update_ratio_median", "train/step_loss"):
            assert name in mine, mine.keys()


def check_the_device_has_no_float64() -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, dtype=torch.float64, device="cuda")
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, device="cuda").double()
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, dtype=torch.float64).copy_(torch.zeros(1, device="cuda"))
    assert not has_float64("cuda")
    assert has_float64("cpu")
    assert widest_float(torch.device("cuda")) == torch.float32


def check_records_are_those_of_the_cpu() -> None:
    for options in ({}, {"sample_size": "sampled"}, {"interval": 1}):
        expected = comparable(observe("cpu", **options))
        for seed in (0, 2):
            set_order(seed)
            run = observe("cuda:1", backend="auto", **options)
            assert not any(record.get("faults") for record in run.records), run.records[-1]
            close(comparable(run), expected)


def check_a_nan_is_located() -> None:
    def spoil(step: int, model: nn.Module) -> None:
        if step == 4:
            model[1].inner.weight.grad[0, :2] = torch.nan

    run = observe("cuda", spoil=spoil, backend="auto")
    assert next(r["nonfinite"] for r in run.records if r.get("nonfinite"))["places"]


def check_no_probe_reads_the_memory_of_a_copy() -> None:
    shards = [copied_to_host(shard) for shard in capture(made_model("cuda"))]
    plan = build_plan(shards, Reading(), 0, torch.device("cpu"))
    for backend in ("auto", "torch", "native"):
        assert isinstance(choose_probe(backend, plan, shards), TorchProbe)


def check_a_replaced_parameter_is_read_on_the_host() -> None:
    model, options = made_model("cuda"), settings(interval=2, backend="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **options) as monitor:
        train(model, [optimizer], monitor, range(1, 3))
        new = nn.Parameter(torch.full_like(model[2].bias, 3.0))
        model[2].bias = new
        optimizer.param_groups[0]["params"][-1] = new
        train(model, [optimizer], monitor, range(3, 5))
        shard = monitor.cycle.observer.rows.shards[-1]
        assert shard.copied
        assert shard.parameter is new
        assert shard.weight().is_cpu
    last = distmon.read_run(options["run_dir"]).records[-1]
    assert last["step"] == 4
    assert not last.get("faults"), last


def check_tasks_and_numbers_of_the_device() -> None:
    model, options = made_model("cuda"), settings(interval=2, task_interval=2, backend="auto")
    optimizer = adamw(model)
    with distmon.attach(model, optimizer, **options) as monitor:
        for _ in range(6):
            out = model(torch.ones(4, 32, device="cuda"))
            losses = {"a": out.square().mean(), "b": out.abs().mean()}
            monitor.task_losses(losses)
            total = losses["a"] + losses["b"]
            total.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            tokens = torch.full((), 64, device="cuda")
            monitor.step(loss=total.detach(), grad_norm=norm, tokens=tokens, lr=norm)
    records = distmon.read_run(options["run_dir"]).records
    assert [record["step"] for record in records] == [2, 4, 6]
    assert not any(record.get("faults") for record in records), records
    assert any(name.startswith("tasks/") for name in records[-1]["metrics"]), records[-1]["metrics"]
    assert records[-1]["ranks"]["tokens"][0] == 128

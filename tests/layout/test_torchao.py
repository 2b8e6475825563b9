"""Weights of torchao: those that are trained are read, packed ones are named.

Skipped where torchao is not installed; `test_wrapped.py` has subclasses that behave as its own do.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from small_runs import quiet
from torch import nn

import distmon
from distmon.layout.capture import capture

pytest.importorskip("torchao")


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to(torch.bfloat16)


def fp8_training(model: nn.Module, gathers_in_fp8: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_in_fp8, emulate=True)
    return convert_to_float8_training(model, config=config)


@pytest.mark.parametrize("gathers_in_fp8", [False, True])
def test_weights_of_fp8_training_are_observed(tmp_path: Path, gathers_in_fp8: bool) -> None:
    model = fp8_training(two_layers(), gathers_in_fp8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=1)) as monitor:
        model(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        monitor.step()
    norm = nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
    assert [s.name for s in capture(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not monitor.last_record.faults
    metrics = monitor.last_record.metrics
    assert metrics["monitor/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics["monitor/update_ratio_median"] > 0


def test_packed_weights_are_named(caplog: pytest.LogCaptureFixture) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = two_layers()
    quantize_(model, Float8WeightOnlyConfig())
    with caplog.at_level(logging.WARNING):
        assert [shard.name for shard in capture(model)] == ["0.bias", "1.bias"]
    assert "not monitored: 0.weight (a Float8Tensor), 1.weight (a Float8Tensor)" in caplog.text

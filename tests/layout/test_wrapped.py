"""Weights inside tensor subclasses, as libraries for fp8 training have them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from distmon.layout.capture import capture
from distmon.probe.torch_probe import TorchProbe
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading


class Wrapper(torch.Tensor):
    """A subclass around other tensors: the weight and its scale, or packed values and a scale."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.bfloat16)

    def __init__(self, held: torch.Tensor, scale: torch.Tensor) -> None:
        self.held, self.scale = held, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held, args[0].scale)
        raise NotImplementedError(func)


def model_of(held: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Wrapper(held, torch.ones(())))
    return model


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])  # torchao holds a parameter
def test_the_weight_inside_is_read(kind: type[torch.Tensor]) -> None:
    held = torch.arange(16.0, dtype=torch.bfloat16).view(4, 4)
    held = nn.Parameter(held) if kind is nn.Parameter else held
    model = model_of(held)
    model.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    shard = {s.name: s for s in capture(model)}["weight"]
    assert shard.weight() is held
    assert shard.dtype == torch.bfloat16
    assert shard.grad() is model.weight.grad
    assert shard.parameter is model.weight


def test_packed_values_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(torch.ones(4, 4, dtype=torch.float8_e4m3fn))
    with caplog.at_level(logging.WARNING):
        assert [s.name for s in capture(model)] == ["bias"]
    assert "not monitored: weight (a Wrapper)" in caplog.text


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_plain_fp8_weights_are_read_by_torch(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    shards = capture(model)
    plan = build_plan(shards, Reading(), 0, torch.device("cpu"))
    TorchProbe(plan, shards).snapshot()
    assert all(chunk.snapshot.isfinite().all() for chunk in plan.chunks)

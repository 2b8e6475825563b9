"""fp8 weights of TransformerEngine, by a stand-in that behaves as its `Float8Tensor` does.

The real library needs a GPU to be imported.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from small_runs import quiet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

import distmon
from distmon.errors import LayoutError
from distmon.layout.capture import capture


class Float8Tensor(torch.Tensor):
    """Bytes and a scale behind a bfloat16 face: every operation works on a dequantized copy."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor) -> Float8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor) -> None:
        self._data, self._scale_inv, self._transpose = data, scale_inv, None
        self._fp8_dtype = torch.float8_e4m3fn

    @classmethod
    def quantized(cls, values: torch.Tensor) -> Float8Tensor:
        scale_inv = values.abs().max().float().reshape(1) / 448
        return cls((values / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8), scale_inv)

    def dequantize(self) -> torch.Tensor:
        return (self._data.view(self._fp8_dtype).float() * self._scale_inv).to(torch.bfloat16)

    def quantize_(self, values: torch.Tensor) -> None:
        new = Float8Tensor.quantized(values)
        self._data.copy_(new._data)
        self._scale_inv.copy_(new._scale_inv)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0]._data, args[0]._scale_inv)
        if func is torch.ops.aten.view.default:
            raise NotImplementedError("Float8Tensor class does not support tensor views")

        def plain(given: Any) -> Any:
            return given.dequantize() if isinstance(given, Float8Tensor) else given

        read = tree_map(plain, args)
        result = func(*read, **tree_map(plain, kwargs or {}))
        if not func._schema.is_mutable:
            return result
        args[0].quantize_(read[0])
        return args[0]


class FlattenedFloat8Tensor(Float8Tensor):
    """With the protocol of torch.compile, and a transpose that does not exist yet."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_scale_inv", "_transpose"], None


class CastWeight(Float8Tensor):
    """Holds the trained weight too and casts it when it is gathered, as torchao's does."""

    def __init__(self, held: torch.Tensor, scale_inv: torch.Tensor) -> None:
        super().__init__(held, scale_inv)
        self._tensor = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None


def fp8_model(kind: type[Float8Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8)).bfloat16()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind.quantized(layer.weight.detach()))
    return model


@pytest.mark.parametrize("kind", [Float8Tensor, FlattenedFloat8Tensor])
def test_fp8_weights_are_named_once_and_the_rest_is_observed(
    kind: type[Float8Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fp8_model(kind)
    before = model[0].weight.dequantize()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with (
        caplog.at_level(logging.WARNING, "distmon"),
        distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor,
    ):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 32, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            monitor.step(loss=loss.detach(), grad_norm=norm)
        record = monitor.last_record
    assert not torch.equal(model[0].weight.dequantize(), before)  # it was trained
    assert record is not None
    assert not record.faults
    assert record.metrics["monitor/grad_norm"] == pytest.approx(float(norm))
    assert record.metrics["monitor/update_ratio_median"] > 0
    assert [s.name for s in capture(model)] == ["0.bias", "1.weight", "1.bias", "2.bias"]
    named = f"not monitored: 0.weight (a {kind.__name__}), 2.weight (a {kind.__name__})"
    assert len([r for r in caplog.records if named in r.getMessage()]) == 2  # attach and capture
    assert len(caplog.records) == 2, caplog.text


def test_a_model_of_fp8_weights_alone_is_refused_by_the_reason() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(Float8Tensor.quantized(torch.ones(4, 4)))
    with pytest.raises(LayoutError, match=r"none .* can be read: weight \(a Float8Tensor\)"):
        capture(model)


def _captured_dtensors(_rank: int, world: int) -> tuple[list[tuple[str, bool]], str]:
    """Capture DTensors whose local tensors are subclasses, as FSDP2 makes them of such weights."""
    mesh = init_device_mesh("cpu", (world,))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distmon").addHandler(handler)
    model = nn.ParameterDict()
    held = torch.arange(8.0, dtype=torch.bfloat16).view(2, 4)
    for name, local in (
        ("packed", Float8Tensor.quantized(held + 1)),
        ("read", CastWeight(held, torch.ones(1))),
        ("plain", held),
    ):
        dtensor = DTensor.from_local(held.clone(), mesh, [Shard(0)], run_check=False)
        dtensor._local_tensor = local
        model[name] = nn.Parameter(dtensor)
        model[name]._local_tensor = local
    return [(s.name, s.weight() is held) for s in capture(model)], " ".join(messages)


def test_subclasses_inside_dtensors_are_read_or_named() -> None:
    for shards, messages in run_ranks(_captured_dtensors, 2):
        assert shards == [("read", True), ("plain", True)]
        assert "not monitored: packed (a DTensor of Float8Tensor)" in messages

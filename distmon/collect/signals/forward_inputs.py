"""The forward passes of an observed step: how many, on which inputs, in which mode."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from distmon.collect.own_hooks import OwnHook

HASHED: Final = 2048
"""Elements of each input that are hashed."""
INPUTS: Final = 4
"""Inputs that are hashed."""
_HASH_RANGE: Final = 2**40
_LARGEST: Final = 1e30
"""Larger inputs count as this one: the sum of the products must be finite."""
_ALSO_IN_NUMPY: Final = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
)


class ForwardInputs:
    """Observes the training forwards of whole models. Inert unless armed."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, hashes: bool) -> None:
        self._hashes = hashes
        self._layers = [layer for model in models for layer in _layers_with_a_mode(model)]
        self.layers = len(self._layers)
        """BatchNorm and Dropout layers of the models."""
        self.batchnorm_layers = sum(isinstance(layer, _BatchNorm) for layer in self._layers)
        self._armed = False
        self.fault: Exception | None = None
        """What went wrong in the hook; it then does nothing."""
        self.seconds = 0.0
        """Time that the hook took so far."""
        self.count = 0
        """Training forwards of this step."""
        self.in_eval: list[nn.Module] = []
        """BatchNorm and Dropout layers in eval mode during the first of them."""
        self._hash: torch.Tensor | float = math.nan
        self._weights: torch.Tensor | None = None
        """Of the elements, on an accelerator, where bytes are not to be read one after another."""
        if device.type != "cpu":
            self._hash = torch.full((), math.nan, dtype=torch.float64, device=device)
            generator = torch.Generator().manual_seed(1)
            weights = torch.rand(HASHED, generator=generator, dtype=torch.float64) + 0.5
            self._weights = weights.to(device)
        self._device = torch.device("cpu") if self._weights is None else self._weights.device

    def arm(self) -> None:
        """Observe the coming step."""
        self._armed, self.count, self.in_eval = True, 0, []
        if isinstance(self._hash, torch.Tensor):
            self._hash.fill_(math.nan)
        else:
            self._hash = math.nan

    def disarm(self) -> None:
        """Ignore the coming steps."""
        self._armed = False

    def hash(self) -> torch.Tensor | float:
        """Return a whole number below 2**40 for the inputs of the first forward; NaN without.

        It is on the device; a plain number on a CPU.
        """
        return self._hash

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before every forward of a whole model."""
        if not self._armed:
            return
        try:
            if not torch.is_grad_enabled():
                return
            self.count += 1
            if self.count > 1:
                return
            self.in_eval = [layer for layer in self._layers if not layer.training]
            if self._hashes:
                # Such as those of `torch.func`: they have no numbers yet.
                with suppress(RuntimeError, TypeError, NotImplementedError):
                    self._read_hash([*args, *kwargs.values()])
        except Exception as error:  # never into the forward pass of the user
            self.fault = error

    def _read_hash(self, inputs: Iterable[Any]) -> None:
        tensors = [each for each in _flat(inputs) if self._is_readable(each)][:INPUTS]
        if not tensors:
            return
        if isinstance(self._hash, torch.Tensor) and self._weights is not None:
            self._hash.copy_(_weighted(tensors, self._weights))
        else:
            self._hash = float(_checksum(tensors))

    def _is_readable(self, value: Any) -> bool:
        return (
            type(value) is torch.Tensor
            and value.numel() > 0
            and value.device == self._device
            and not (value.is_complex() or value.is_sparse)
        )


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return 40 bits for HASHED elements of each tensor on a CPU, spread evenly."""
    crc, adler = 0, 1
    for tensor in tensors:
        stride = max(1, tensor.numel() // HASHED)
        values = tensor.detach()
        if values.dtype not in _ALSO_IN_NUMPY:
            values, stride = values.reshape(-1)[::stride][:HASHED].to(torch.float64), 1
        # After a training step all code is cold: each function takes longer than its work.
        spread = values.numpy().reshape(-1)[: HASHED * stride : stride]
        raw = spread.tobytes()
        crc, adler = zlib.crc32(raw, crc), zlib.adler32(raw, adler)
    return (adler & 0xFF) << 32 | crc


@torch.no_grad()
def _weighted(tensors: Iterable[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Return a number for HASHED elements of each tensor on the device of `weights`."""
    total = torch.zeros((), dtype=torch.float64, device=weights.device)
    for number, tensor in enumerate(tensors, start=1):
        stride = max(1, tensor.numel() // HASHED)
        values = tensor.reshape(-1)[::stride][:HASHED].to(torch.float64)
        finite = values.nan_to_num(0.0, 1.0, -1.0).clamp(-_LARGEST, _LARGEST)
        total += number * (finite * weights[: values.numel()]).sum()
    # The mantissa of the product is as good as random; keep 40 bits of it.
    mantissa, _ = torch.frexp(total * math.pi)
    return (mantissa.abs() * _HASH_RANGE).floor()


class ForwardHook(OwnHook):
    """Reports the forwards of a whole model, with their inputs."""

    def __init__(self, inputs: ForwardInputs) -> None:
        self._inputs = inputs

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        inputs = self._inputs
        try:
            if is_compiling():
                return
            begin = perf_counter()
            # A hook that is removed within the call of the module is still called, without kwargs.
            inputs.forward_begins(args, kwargs or {})
            inputs.seconds += perf_counter() - begin
        except Exception as error:  # never into the forward pass of the user
            inputs.fault = error


def _flat(inputs: Iterable[Any]) -> Iterable[Any]:
    for each in inputs:
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, list | tuple):
            yield from each
        else:
            yield each


def _layers_with_a_mode(model: nn.Module) -> list[nn.Module]:
    """Return the layers that compute something else in eval mode."""
    found: list[nn.Module] = []
    for module in model.modules():
        if (isinstance(module, _BatchNorm) and module.track_running_stats) or (
            isinstance(module, _DropoutNd) and module.p > 0
        ):
            found.append(module)
    return found

"""The forward passes of an observed step: how many, on which inputs, in which mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from distmon.collect.own_hooks import OwnHook

HASHED: Final = 2048
"""Elements of each input that are hashed."""
INPUTS: Final = 4
"""Inputs that are hashed."""
_HASH_RANGE: Final = 2**40


class ForwardInputs:
    """Observes the training forwards of whole models. Inert unless armed."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device, hashes: bool) -> None:
        self._hashes = hashes
        self._layers = [layer for model in models for layer in _layers_with_a_mode(model)]
        self._armed = False
        self.fault: Exception | None = None
        """What went wrong in the hook; it then does nothing."""
        self.count = 0
        """Training forwards of this step."""
        self.in_eval: list[nn.Module] = []
        """BatchNorm and Dropout layers in eval mode during the first of them."""
        generator = torch.Generator().manual_seed(1)
        weights = torch.rand(HASHED, generator=generator, dtype=torch.float64) + 0.5
        self._weights = weights.to(device) if hashes else None
        self._hash = torch.full((), math.nan, dtype=torch.float64, device=device)

    @property
    def layers(self) -> int:
        """BatchNorm and Dropout layers of the models."""
        return len(self._layers)

    @property
    def batchnorm_layers(self) -> int:
        """BatchNorm layers of the models."""
        return sum(isinstance(layer, _BatchNorm) for layer in self._layers)

    def arm(self) -> None:
        """Observe the coming step."""
        self._armed, self.count, self.in_eval = True, 0, []
        self._hash.fill_(math.nan)

    def disarm(self) -> None:
        """Ignore the coming steps."""
        self._armed = False

    def hash(self) -> torch.Tensor:
        """Return a whole number below 2**40 for the inputs of the first forward; NaN without."""
        return self._hash

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before every forward of a whole model."""
        if not self._armed or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.count += 1
        if self.count > 1:
            return
        try:
            self.in_eval = [layer for layer in self._layers if not layer.training]
            if self._hashes:
                self._read_hash([*args, *kwargs.values()])
        except Exception as error:  # never into the forward pass of the user
            self.fault = error

    @torch.no_grad()
    def _read_hash(self, inputs: Iterable[Any]) -> None:
        assert self._weights is not None
        tensors = [each for each in _flat(inputs) if type(each) is torch.Tensor and each.numel()]
        total = torch.zeros_like(self._hash)
        for number, tensor in enumerate(tensors[:INPUTS], start=1):
            if tensor.is_complex() or tensor.is_sparse or tensor.device != total.device:
                continue
            stride = max(1, tensor.numel() // HASHED)
            values = tensor.detach().reshape(-1)[::stride][:HASHED].to(torch.float64)
            total += number * (values * self._weights[: values.numel()]).nan_to_num().sum()
        if tensors:
            # The mantissa of the product is as good as random; keep 40 bits of it.
            mantissa, _ = torch.frexp(total * math.pi)
            self._hash.copy_((mantissa.abs() * _HASH_RANGE).floor())


class ForwardHook(OwnHook):
    """Reports the forwards of a whole model, with their inputs."""

    def __init__(self, inputs: ForwardInputs) -> None:
        self._inputs = inputs

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.forward_begins(args, kwargs)


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

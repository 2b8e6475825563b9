"""Hooks on modules whose output is watched as an activation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling

from distmon.collect.gradient_gain.in_graph import never_compile_alone, register_effect
from distmon.collect.inside.activation_rows import Bounds, add_activation
from distmon.collect.inside.tables import Watching
from distmon.collect.own_hooks import OwnHook
from distmon.layout.units import LocalActivation, local_activation

_NESTING: Final = 3
_CHANNELS_FIRST: Final = (
    *(nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm),
    *(nn.GroupNorm, nn.modules.instancenorm._InstanceNorm),
)


class ActivationRow:
    """The row of one activation, and how its tensors are read."""

    def __init__(
        self,
        watching: Watching,
        row: tuple[torch.Tensor, torch.Tensor],
        bounds: Bounds,
        makers: Sequence[nn.Module] = (),
    ) -> None:
        """`makers` are the layers whose units these may be; the last one is the most likely."""
        self.watching = watching
        self.sums, self.maxima = row
        self.bounds = bounds
        self._makers = makers
        self.sums.watching = watching  # type: ignore[attr-defined]
        for each in row:
            torch._dynamo.mark_static_address(each)

    def channels_first(self, dims: int) -> bool:
        """Return whether the units of a tensor are its second dimension."""
        for maker in reversed(self._makers):
            if isinstance(maker, _CHANNELS_FIRST):
                return True
            if getattr(maker, "weight", None) is not None:
                return False
        return dims > 3

    def add(self, tensor: torch.Tensor) -> None:
        """Add the statistics of a tensor."""
        first = self.channels_first(tensor.dim())
        part = None
        for maker in (*self._makers[::-1], None):
            part = local_activation(tensor.detach(), maker, first)
            if part is None or part.units != part.values.shape[part.dim]:
                break
        if part is not None:
            add_activation(part, self.sums, self.maxima, self.bounds)


class ActivationHook(OwnHook):
    """Forward hook that adds the output of a module to its row."""

    def __init__(self, row: ActivationRow) -> None:
        self._row = row
        self._traceable = operator_library() is not None
        never_compile_alone(ActivationHook.__call__, ActivationHook._add, _first_tensor)

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        # In this order: a compiler that reads the switch would recompile when it changes.
        if is_compiling():
            counts = module.training and torch.is_grad_enabled()
            tensor = _first_tensor(output) if counts else None
            if tensor is not None and type(tensor) is torch.Tensor and self._traceable:
                row = self._row
                first = row.channels_first(tensor.dim())
                torch.ops.distmon.add_activation(
                    tensor.detach(), row.sums, row.maxima, first, *row.bounds
                )
        elif self._row.watching.armed:
            self._add(module, output)

    def _add(self, module: nn.Module, output: Any) -> None:
        watching, begin = self._row.watching, perf_counter()
        try:
            tensor = _first_tensor(output)
            if tensor is not None and watching.counts(module.training, tensor.device):
                self._row.add(tensor)
        except Exception as error:
            watching.failed(error, self._row.sums)
        watching.seconds += perf_counter() - begin


def _first_tensor(value: Any, nesting: int = _NESTING) -> torch.Tensor | None:
    """Return the first floating tensor in `value` that has more than one dimension."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() and value.dim() > 1 else None
    if isinstance(value, dict):
        value = list(value.values())
    if nesting and isinstance(value, tuple | list):
        for each in value:
            found = _first_tensor(each, nesting - 1)
            if found is not None:
                return found
    return None


@cache
def operator_library() -> torch.library.Library | None:
    """Register `torch.ops.distmon.add_activation`; None where compiled graphs are left alone."""
    return register_effect(
        "add_activation(Tensor values, Tensor sums, Tensor maxima, bool channels_first, "
        "float low, float high) -> ()",
        _add_from_graph,
    )


def _add_from_graph(
    values: torch.Tensor,
    sums: torch.Tensor,
    maxima: torch.Tensor,
    channels_first: bool,
    low: float,
    high: float,
) -> None:
    watching: Watching | None = getattr(sums, "watching", None)
    if watching is None or not watching.counts_in_graph(values.device):
        return
    try:
        dim = 1 if channels_first and values.dim() > 2 else values.dim() - 1
        part = LocalActivation(values, dim, 0, values.shape[dim])
        # `data` has a version of its own: autograd may have saved the row for a compiled graph.
        add_activation(part, sums.data, maxima.data, (low, high))
    except Exception as error:
        watching.failed(error, sums.data)

"""Parameters that are not sharded: no wrapper, or DDP."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from distmon.errors import LayoutError
from distmon.layout.shard import Context, Everything, Shard

EVERYTHING: Final = Everything()
PATHS: Final = ("", "grad")


def shard_of(name: str, parameter: torch.Tensor, context: Context) -> Shard | None:
    """Return the shard of a parameter that is a tensor and nothing more."""
    kind = type(parameter)
    if kind is not nn.Parameter and not _is_plain(kind, parameter):
        return None
    if hasattr(parameter, "ds_numel"):
        raise LayoutError(
            f"parameter {name} is partitioned by DeepSpeed: attach to the engine instead"
        )
    # What shards or reduces other kinds of parameters may put them aside while it runs.
    return plain_shard(name, parameter, None if context.gradient_is_reduced else context.path)


def _is_plain(kind: type, parameter: torch.Tensor) -> bool:
    # First by the class alone: `data` of a DTensor takes 50 us.
    if kind is not torch.Tensor and not issubclass(kind, nn.Parameter):
        return False
    return type(parameter.data) is torch.Tensor


def plain_shard(
    name: str, parameter: torch.Tensor, path: tuple[weakref.ref[nn.Module], str] | None = None
) -> Shard:
    """Return the shard of an ordinary parameter, which is all of it."""
    if parameter.is_complex():
        return replace(_complex_shard(name, parameter), path=path)
    tensors = _Tensors(parameter)
    return Shard(
        name=name,
        global_shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        region=EVERYTHING,
        weight=tensors.weight,
        grad=tensors.grad,
        gate=parameter,
        grad_is_unreadable=tensors.grad_is_unreadable,
        sparse_grad=tensors.sparse_grad,
        parameters=(parameter,),
        paths=PATHS,
        sharding="whole",
        path=path,
    )


class _Tensors:
    """Weight and gradient of one parameter.

    Called for every parameter at every observation: `is` costs a third of `==`.
    """

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def weight(self) -> torch.Tensor:
        return self._parameter

    def grad(self) -> torch.Tensor | None:
        gradient = self._parameter.grad
        return gradient if gradient is None or gradient.layout is torch.strided else None

    def sparse_grad(self) -> torch.Tensor | None:
        gradient = self._parameter.grad
        return gradient if gradient is not None and gradient.layout is torch.sparse_coo else None

    def grad_is_unreadable(self) -> bool:
        gradient = self._parameter.grad
        return gradient is not None and gradient.layout not in (torch.strided, torch.sparse_coo)


def _complex_shard(name: str, parameter: torch.Tensor) -> Shard:
    """Return the shard of a complex parameter: its real and imaginary parts in a last dimension."""

    def weight() -> torch.Tensor:
        return torch.view_as_real(parameter.detach())

    def grad() -> torch.Tensor | None:
        gradient = parameter.grad
        return None if gradient is None else torch.view_as_real(gradient.resolve_conj())

    return Shard(
        name=name,
        global_shape=(*parameter.shape, 2),
        dtype=weight().dtype,
        region=EVERYTHING,
        weight=weight,
        grad=grad,
        gate=parameter,
        grad_is_unreadable=lambda: False,
        parameters=(parameter,),
        sharding="whole",
    )

"""Parameters that are not sharded: no wrapper, or DDP."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
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
    model = None if context.gradient_is_reduced else context.model
    return plain_shard(name, parameter, model, context.path)


def _is_plain(kind: type, parameter: torch.Tensor) -> bool:
    # First by the class alone: `data` of a DTensor takes 50 us.
    if kind is not torch.Tensor and not issubclass(kind, nn.Parameter):
        return False
    return type(parameter.data) is torch.Tensor


def plain_shard(
    name: str,
    parameter: torch.Tensor,
    model: weakref.ref[nn.Module] | None = None,
    path: str = "",
) -> Shard:
    """Return the shard of an ordinary parameter, which is all of it."""
    if parameter.is_complex():
        return ComplexShard(
            name=name,
            global_shape=(*parameter.shape, 2),
            dtype=parameter.dtype.to_real(),
            region=EVERYTHING,
            gate=parameter,
            parameter=parameter,
            sharding="whole",
            model=model,
            path=path,
        )
    return PlainShard(
        name=name,
        global_shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        region=EVERYTHING,
        gate=parameter,
        parameter=parameter,
        paths=PATHS,
        sharding="whole",
        model=model,
        path=path,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class PlainShard(Shard):
    """A parameter that is a tensor and nothing more.

    Read at every observation: `is` costs a third of `==`.
    """

    parameter: torch.Tensor

    def weight(self) -> torch.Tensor:
        return self.parameter

    def grad(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return gradient if gradient is None or gradient.layout is torch.strided else None

    def sparse_grad(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return gradient if gradient is not None and gradient.layout is torch.sparse_coo else None

    def grad_is_unreadable(self) -> bool:
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout not in (torch.strided, torch.sparse_coo)


@dataclass(slots=True, kw_only=True, eq=False)
class ComplexShard(Shard):
    """A complex parameter: its real and imaginary parts in a last dimension."""

    parameter: torch.Tensor

    def weight(self) -> torch.Tensor:
        return torch.view_as_real(self.parameter.detach())

    def grad(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else torch.view_as_real(gradient.resolve_conj())

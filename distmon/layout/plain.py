"""Parameters that are not sharded: no wrapper, or DDP."""

from __future__ import annotations

import torch

from distmon.errors import LayoutError
from distmon.layout.shard import Everything, Shard


def shard_of(name: str, parameter: torch.Tensor, _: bool) -> Shard | None:
    """Return the shard of a parameter that is a tensor and nothing more."""
    if type(parameter.data) is not torch.Tensor:
        return None
    if hasattr(parameter, "ds_numel"):
        raise LayoutError(
            f"parameter {name} is partitioned by DeepSpeed: attach to the engine instead"
        )
    return plain_shard(name, parameter)


def plain_shard(name: str, parameter: torch.Tensor) -> Shard:
    """Return the shard of an ordinary parameter, which is all of it."""
    if parameter.is_complex():
        return _complex_shard(name, parameter)
    strided, coordinates = torch.strided, torch.sparse_coo

    # Called for every parameter at every observation: `is` costs a third of `==`.
    def grad() -> torch.Tensor | None:
        gradient = parameter.grad
        return gradient if gradient is None or gradient.layout is strided else None

    def sparse_grad() -> torch.Tensor | None:
        gradient = parameter.grad
        return gradient if gradient is not None and gradient.layout is coordinates else None

    def is_unreadable() -> bool:
        gradient = parameter.grad
        return gradient is not None and gradient.layout not in (strided, coordinates)

    return Shard(
        name=name,
        global_shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        region=Everything(),
        weight=lambda: parameter,
        grad=grad,
        gate=parameter,
        grad_is_unreadable=is_unreadable,
        sparse_grad=sparse_grad,
        parameters=(parameter,),
        paths=("", "grad"),
        sharding="whole",
    )


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
        region=Everything(),
        weight=weight,
        grad=grad,
        gate=parameter,
        grad_is_unreadable=lambda: False,
        parameters=(parameter,),
        sharding="whole",
    )

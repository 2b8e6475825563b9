"""DTensors: FSDP2, HSDP, tensor parallelism, and both at once.

A rank holds a block of the parameter, computed from its mesh and placements. The number of replicas
is not computed here: the reduction counts elements over all ranks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distmon.errors import LayoutError, UnreadableParameterError
from distmon.layout.shard import REDUCED_PATHS, Context, Region, Shard, region_of_box
from distmon.layout.wrapped import inner_name


@dataclass(frozen=True, slots=True)
class Block:
    """What parameters of one shape with the same placements have in common."""

    shape: tuple[int, ...]
    region: Region
    sharding: str
    replicated: bool
    """Over a mesh dimension of more than one rank."""


def shard_of(name: str, parameter: Any, context: Context) -> Shard | None:
    """Return the shard of a parameter that is a DTensor."""
    if not isinstance(parameter, DTensor):
        return None
    spec, local = parameter._spec, parameter._local_tensor
    # Finding the block takes torch 100 us; large models have few different ones.
    key = (id(spec.mesh), spec.placements, spec.shape, local.shape)
    block = context.known.get(key)
    if block is None:
        block = context.known[key] = _block(name, parameter)
    return _dtensor_shard(
        name, parameter, block, context.gradient_is_reduced, context.model, context.path
    )


def dtensor_shard(
    name: str,
    parameter: DTensor,
    gradient_is_reduced: bool,
    model: weakref.ref[nn.Module] | None = None,
    path: str = "",
) -> Shard:
    """Return the shard of a parameter that is a DTensor.

    `gradient_is_reduced`: a wrapper reduces the gradient before the optimizer step. Otherwise a
    parameter that is replicated over a mesh dimension may end its backward with a partial gradient
    on every rank, as norm layers do under sequence parallelism.
    """
    block = _block(name, parameter)
    return _dtensor_shard(name, parameter, block, gradient_is_reduced, model, path)


def _dtensor_shard(
    name: str,
    parameter: DTensor,
    block: Block,
    gradient_is_reduced: bool,
    model: weakref.ref[nn.Module] | None,
    path: str,
) -> Shard:
    known: dict[str, Any] = {
        "name": name,
        "global_shape": block.shape,
        "region": block.region,
        "gate": parameter,
        "parameter": parameter,
        "sharding": block.sharding,
        "may_be_partial": block.replicated and not gradient_is_reduced,
        "model": model,
        "path": path,
        "finished": parameter._spec,
    }
    inner = _inner_path(parameter)
    if inner:
        paths = (f"{REDUCED_PATHS[0]}.{inner}", REDUCED_PATHS[1])
        dtype = getattr(parameter._local_tensor, inner).dtype
        return WrappedDTensorShard(
            dtype=dtype, paths=paths if gradient_is_reduced else None, inner=inner, **known
        )
    return DTensorShard(
        dtype=parameter._local_tensor.dtype,
        paths=REDUCED_PATHS if gradient_is_reduced else None,
        **known,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class DTensorShard(Shard):
    """A DTensor around an ordinary tensor.

    `_local_tensor` and not `to_local()`: 0.04 us instead of 4 to 16, for every parameter.
    """

    parameter: Any
    finished: Any
    """Spec of a gradient that needs no reduction; comparing placements takes longer."""

    def weight(self) -> torch.Tensor:
        local: torch.Tensor = self.parameter._local_tensor
        return local

    def grad(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient._spec is not self.finished:
            if not _is_same_after_reduction(gradient.placements, self.parameter.placements):
                return None
            if not any(p.is_partial() for p in gradient.placements):
                self.finished = gradient._spec
        return _waited(gradient)

    def grad_is_unreadable(self) -> bool:
        gradient = self.parameter.grad
        return gradient is not None and not _is_same_after_reduction(
            gradient.placements, self.parameter.placements
        )

    def partial_count(self) -> int:
        gradient = self.parameter.grad
        if gradient is None or gradient._spec is self.finished:
            return 1
        sizes = gradient.device_mesh.shape
        count = 1
        for size, placement in zip(sizes, gradient.placements, strict=True):
            count *= size if placement.is_partial("sum") else 1
        return count


@dataclass(slots=True, kw_only=True, eq=False)
class WrappedDTensorShard(DTensorShard):
    """A DTensor whose local tensor is a subclass around the weight."""

    inner: str
    """Attribute of the local tensor that holds the weight."""

    def weight(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.parameter._local_tensor, self.inner)
        return tensor


def _inner_path(parameter: DTensor) -> str:
    """Return the attribute of the local tensor that holds the weight, "" for itself."""
    local = parameter._local_tensor
    if type(local) is torch.Tensor or type(local) is nn.Parameter:
        return ""
    inner = inner_name(local)
    if inner is None:
        raise UnreadableParameterError(f"a DTensor of {type(local).__name__}")
    return inner


def _is_same_after_reduction(found: Any, expected: tuple[Any, ...]) -> bool:
    """Return whether a gradient, once summed over ranks, has the placements of its parameter."""
    return len(found) == len(expected) and all(
        f == e or (f.is_partial("sum") and isinstance(e, Replicate))
        for f, e in zip(found, expected, strict=True)
    )


def _waited(gradient: DTensor) -> torch.Tensor:
    """Return the local tensor, after waiting for an asynchronous collective that fills it."""
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _block(name: str, parameter: DTensor) -> Block:
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return Block(
        shape=tuple(parameter.shape),
        region=_region(name, parameter),
        sharding=_sharding(parameter),
        replicated=any(isinstance(where, Replicate) and size > 1 for size, where in placed),
    )


def _region(name: str, parameter: DTensor) -> Region:
    shape = tuple(parameter.shape)
    size, offset = compute_local_shape_and_global_offset(
        shape, parameter.device_mesh, parameter.placements
    )
    local = tuple(parameter._local_tensor.shape)
    if parameter._local_tensor.numel() and local != tuple(size):
        raise LayoutError(
            f"parameter {name} of shape {shape} with placements {parameter.placements} should have "
            f"the local shape {tuple(size)}, but has {local}; distmon cannot observe this layout"
        )
    if not parameter._local_tensor.numel():
        size, offset = (0,) * len(shape), (0,) * len(shape)
    return region_of_box(shape, tuple(offset), tuple(size))


def _sharding(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    over = [
        f"{name}{size}{'=' if isinstance(placement, Replicate) else '/'}"
        for name, size, placement in zip(names, mesh.shape, parameter.placements, strict=True)
    ]
    return ",".join(over)

"""DTensors: FSDP2, HSDP, tensor parallelism, and both at once.

A rank holds a block of the parameter. Which one is computed from mesh and placements; how often a
block is replicated is not asked here, because counting elements over ranks tells it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distmon.errors import LayoutError
from distmon.layout.shard import Region, Shard, region_of_box


def dtensor_shard(name: str, parameter: DTensor, gradient_is_reduced: bool) -> Shard:
    """The shard of a parameter that is a DTensor.

    `gradient_is_reduced`: its wrapper adds up gradients over ranks before the optimizer sees them.
    Otherwise a parameter that is replicated over a mesh dimension may end its backward with a
    gradient that is still one addend per rank, as norms do under sequence parallelism.
    """
    expected = tuple(parameter.placements)
    finished = parameter._spec
    # `_local_tensor` and not `to_local()`: 0.04 us instead of 4 to 16, for every parameter.

    def grad() -> torch.Tensor | None:
        nonlocal finished
        gradient: Any = parameter.grad
        if gradient is None:
            return None
        if gradient._spec is not finished:
            if not _is_same_up_to_sums(gradient.placements, expected):
                return None
            if not any(p.is_partial() for p in gradient.placements):
                finished = gradient._spec
        return _settled(gradient)

    def grad_is_unreadable() -> bool:
        gradient: Any = parameter.grad
        return gradient is not None and not _is_same_up_to_sums(gradient.placements, expected)

    def addends() -> int:
        gradient: Any = parameter.grad
        if gradient is None or gradient._spec is finished:
            return 1
        sizes = gradient.device_mesh.shape
        count = 1
        for size, placement in zip(sizes, gradient.placements, strict=True):
            # An average is a sum of addends that were not divided yet.
            count *= size if placement.is_partial("sum") else 1
        return count

    replicated = any(
        isinstance(placement, Replicate) and size > 1
        for size, placement in zip(parameter.device_mesh.shape, expected, strict=True)
    )
    return Shard(
        name=name,
        global_shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        region=_region(name, parameter),
        weight=lambda: parameter._local_tensor,
        grad=grad,
        gate=parameter,
        grad_is_unreadable=grad_is_unreadable,
        parameters=(parameter,),
        paths=("_local_tensor", "grad._local_tensor") if gradient_is_reduced else None,
        spread=_spread(parameter),
        may_be_addend=replicated and not gradient_is_reduced,
        addends=addends,
    )


def _is_same_up_to_sums(found: Any, expected: tuple[Any, ...]) -> bool:
    """Whether a gradient lies on the ranks as its parameter does, once its addends are added."""
    return len(found) == len(expected) and all(
        f == e or (f.is_partial("sum") and isinstance(e, Replicate))
        for f, e in zip(found, expected, strict=True)
    )


def _settled(gradient: DTensor) -> torch.Tensor:
    """The local tensor; a collective on it that still runs in the background is waited for."""
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _region(name: str, parameter: DTensor) -> Region:
    shape = tuple(parameter.shape)
    size, offset = compute_local_shape_and_global_offset(
        shape, parameter.device_mesh, parameter.placements
    )
    local = tuple(parameter._local_tensor.shape)
    if parameter._local_tensor.numel() and local != tuple(size):
        raise LayoutError(
            f"parameter {name} of shape {shape} is placed as {parameter.placements}, which should "
            f"leave {tuple(size)} here, but {local} is; this arrangement cannot be observed"
        )
    if not parameter._local_tensor.numel():
        size, offset = (0,) * len(shape), (0,) * len(shape)
    return region_of_box(shape, tuple(offset), tuple(size))


def _spread(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    over = [
        f"{name}{size}{'=' if isinstance(placement, Replicate) else '/'}"
        for name, size, placement in zip(names, mesh.shape, parameter.placements, strict=True)
    ]
    return ",".join(over)

"""A shard: the piece of one parameter that this rank holds, and where it lies in the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Region(Protocol):
    """Maps flat indices of the unsharded parameter to flat offsets in the local tensor."""

    def local(self, indices: Indices) -> Indices:
        """The offset of each global index in the local tensor, -1 where it is not held here."""
        ...

    def key(self) -> str:
        """Equal on two ranks exactly when they hold the same elements."""
        ...


@dataclass(frozen=True)
class Everything:
    """The whole parameter is here."""

    def local(self, indices: Indices) -> Indices:
        return indices

    def key(self) -> str:
        return "all"


@dataclass(frozen=True)
class FlatRange:
    """The elements `start` to `stop` (not included) of the flattened parameter."""

    start: int
    stop: int

    def local(self, indices: Indices) -> Indices:
        return np.where((indices >= self.start) & (indices < self.stop), indices - self.start, -1)

    def key(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class Box:
    """A block of the parameter: along each dimension `size` elements from `offset` on."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def local(self, indices: Indices) -> Indices:
        places = np.zeros_like(indices)
        inside = np.ones(len(indices), dtype=bool)
        stride = 1
        # From the last dimension to the first: what is left of the index is the coordinates before.
        for length, offset, size in zip(
            self.shape[::-1], self.offset[::-1], self.size[::-1], strict=True
        ):
            indices, coordinate = np.divmod(indices, length)
            inside &= (coordinate >= offset) & (coordinate < offset + size)
            places += (coordinate - offset) * stride
            stride *= size
        return np.where(inside, places, -1)

    def key(self) -> str:
        return f"{self.offset}+{self.size}"


NOWHERE = FlatRange(0, 0)
"""This rank holds nothing of the parameter."""


def region_of_box(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> Region:
    """The simplest region that describes a block of a parameter."""
    if prod(size) == 0:
        return NOWHERE
    if size == shape:
        return Everything()
    if size[1:] == shape[1:]:
        row = prod(shape[1:])
        return FlatRange(offset[0] * row, (offset[0] + size[0]) * row)
    return Box(shape, offset, size)


def _one() -> int:
    return 1


@dataclass(frozen=True)
class Shard:
    """One parameter as seen from this rank.

    `weight()` and `grad()` return the current local tensors without copying; `grad()` is None when
    the parameter has no gradient. Both are in the order that `region` speaks of, whatever their
    strides. `grad_is_unreadable()` says that there is a gradient all the same, but one that cannot
    be read element by element here.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    weight: Callable[[], torch.Tensor]
    grad: Callable[[], torch.Tensor | None]
    gate: torch.Tensor
    """Its `requires_grad` says whether the parameter is trained."""
    grad_is_unreadable: Callable[[], bool]
    parameters: tuple[torch.Tensor, ...]
    """The tensors that an optimizer may own on behalf of this shard; none when it is not here."""
    paths: tuple[str, str] | None = None
    """Attributes that lead from `parameters[0]` to weight ("" for itself) and gradient, where that
    is all that `weight()` and `grad()` do, apart from gradients that are not to be read."""
    spread: str = ""
    """Shards with the same spread are replicated over the same ranks, if at all."""
    may_be_addend: bool = False
    """The gradient here may be one of several that still have to be added; see `addends`."""
    addends: Callable[[], int] = _one
    """How many ranks' gradients add up to the true one; 1 when it is complete."""

    def requires_grad(self) -> bool:
        """Whether the parameter is trained, as of now."""
        return self.gate.requires_grad

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return prod(self.global_shape)


def absent_shard(
    name: str,
    global_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    requires_grad: bool,
    may_be_addend: bool = False,
) -> Shard:
    """A parameter that only other ranks hold, such as one of another pipeline stage."""
    nothing = torch.empty(0, dtype=dtype, device=device)
    return Shard(
        name=name,
        global_shape=global_shape,
        dtype=dtype,
        region=NOWHERE,
        weight=lambda: nothing,
        grad=lambda: None,
        gate=torch.empty(0, device=device, requires_grad=requires_grad),
        grad_is_unreadable=lambda: False,
        parameters=(),
        spread="absent",
        may_be_addend=may_be_addend,
    )

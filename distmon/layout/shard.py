"""A shard: the elements of one parameter that this rank holds, and their global indices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Indices = NDArray[np.int64]


class Region(Protocol):
    """Maps flat indices of the unsharded parameter to flat offsets in the local tensor."""

    def local(self, indices: Indices) -> Indices:
        """Return the local offset of each global index, -1 where this rank does not hold it."""
        ...

    def bounds(self, numel: int, /) -> tuple[int, int]:
        """Return the range of global indices, end not included, that holds all that is here.

        `numel` is the number of elements of the unsharded parameter.
        """
        ...

    def key(self) -> str:
        """Return a string that is equal on two ranks exactly when they hold the same elements."""
        ...


@dataclass(frozen=True)
class Everything:
    """The whole parameter is on this rank."""

    def local(self, indices: Indices) -> Indices:
        return indices

    def bounds(self, numel: int, /) -> tuple[int, int]:
        return 0, numel

    def key(self) -> str:
        return "all"


@dataclass(frozen=True)
class FlatRange:
    """The elements `start` to `stop` (exclusive) of the flattened parameter."""

    start: int
    stop: int

    def local(self, indices: Indices) -> Indices:
        return np.where((indices >= self.start) & (indices < self.stop), indices - self.start, -1)

    def bounds(self, _: int, /) -> tuple[int, int]:
        return self.start, self.stop

    def key(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class Box:
    """A block of the parameter: `size` elements from `offset` on along each dimension."""

    shape: tuple[int, ...]
    """Global shape of the parameter."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def local(self, indices: Indices) -> Indices:
        offsets = np.zeros_like(indices)
        inside = np.ones(len(indices), dtype=bool)
        stride = 1
        # From the last dimension to the first, dividing its length out of the index each time.
        for length, offset, size in zip(
            self.shape[::-1], self.offset[::-1], self.size[::-1], strict=True
        ):
            indices, coordinate = np.divmod(indices, length)
            inside &= (coordinate >= offset) & (coordinate < offset + size)
            offsets += (coordinate - offset) * stride
            stride *= size
        return np.where(inside, offsets, -1)

    def bounds(self, _: int, /) -> tuple[int, int]:
        row = prod(self.shape[1:])
        return self.offset[0] * row, (self.offset[0] + self.size[0]) * row

    def key(self) -> str:
        return f"{self.offset}+{self.size}"


REDUCED_PATHS: Final = ("_local_tensor", "grad._local_tensor")
"""`Shard.paths` of a DTensor whose gradient a wrapper reduces."""
EMPTY_REGION = FlatRange(0, 0)
"""This rank holds no element of the parameter."""


def region_of_box(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> Region:
    """Return the simplest region that describes a block of a parameter."""
    if prod(size) == 0:
        return EMPTY_REGION
    if size == shape:
        return Everything()
    if size[1:] == shape[1:]:
        row = prod(shape[1:])
        return FlatRange(offset[0] * row, (offset[0] + size[0]) * row)
    return Box(shape, offset, size)


def _one() -> int:
    return 1


def _none() -> None:
    return None


@dataclass(slots=True)
class Context:
    """What is known of a parameter besides itself, while the shards of a model are listed."""

    path: tuple[weakref.ref[nn.Module], str] | None = None
    """See `Shard.path`."""
    gradient_is_reduced: bool = False
    """Whether a wrapper reduces the gradient before the optimizer step."""
    known: dict[Hashable, Any] = field(default_factory=dict)
    """What parameters of one kind have in common, by kind; each is found once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter as seen from this rank.

    `weight()` and `grad()` return the current local tensors, without copying unless `copied`;
    `grad()` is None when the parameter has no gradient, or none that can be read element by
    element; then `grad_is_unreadable()` returns True. The offsets of `region` count elements in
    logical order, whatever the strides of the local tensors.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    weight: Callable[[], torch.Tensor]
    grad: Callable[[], torch.Tensor | None]
    gate: torch.Tensor
    """The tensor whose `requires_grad` says whether the parameter is trained."""
    grad_is_unreadable: Callable[[], bool]
    parameters: tuple[torch.Tensor, ...]
    """The tensors that an optimizer may own for this shard; empty for an absent shard."""
    sparse_grad: Callable[[], torch.Tensor | None] = _none
    """Returns the gradient where it is a sparse COO tensor, which is read through its values."""
    paths: tuple[str, str] | None = None
    """Attribute paths from `parameters[0]` to weight ("" for itself) and gradient, for the native
    probe; None where `weight()` and `grad()` do more than read attributes."""
    sharding: str = ""
    """Shards with the same sharding are replicated over the same ranks, if at all."""
    may_be_partial: bool = False
    """Whether the gradient may be partial, that is, still has to be added over ranks."""
    partial_count: Callable[[], int] = _one
    """Returns the number of ranks whose partial gradients add up to the true one; 1 when the
    gradient is complete."""

    copied: bool = False
    """Whether `weight()` and `grad()` return copies on the host; see `host_copies.py`."""
    path: tuple[weakref.ref[nn.Module], str] | None = None
    """The model and the parameter's path in it, where that leads to the trained parameter, or, with
    a wrapper that shards, at times to another kind of tensor. A weak reference: a monitor ends with
    its model."""

    def requires_grad(self) -> bool:
        """Return whether the parameter is trained now; it may change during a run."""
        return self.gate.requires_grad

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return prod(self.global_shape)


def absent_shard(
    name: str,
    global_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    requires_grad: bool,
    may_be_partial: bool = False,
) -> Shard:
    """Return the shard of a parameter that only other ranks hold, as of another pipeline stage."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return Shard(
        name=name,
        global_shape=global_shape,
        dtype=dtype,
        region=EMPTY_REGION,
        weight=lambda: empty,
        grad=lambda: None,
        gate=torch.empty(0, device=device, requires_grad=requires_grad),
        grad_is_unreadable=lambda: False,
        parameters=(),
        sharding="absent",
        may_be_partial=may_be_partial,
    )

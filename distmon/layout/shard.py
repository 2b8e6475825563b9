"""A shard: the elements of one parameter that this rank holds, and their global indices."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, ClassVar, Final, Protocol

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


@dataclass(slots=True)
class Context:
    """What is known of a parameter besides itself, while the shards of a model are listed."""

    model: weakref.ref[nn.Module] | None = None
    """See `Shard.model`."""
    path: str = ""
    """See `Shard.path`."""
    gradient_is_reduced: bool = False
    """Whether a wrapper reduces the gradient before the optimizer step."""
    known: dict[Hashable, Any] = field(default_factory=dict)
    """What parameters of one kind have in common, by kind; each is found once."""


@dataclass(slots=True, kw_only=True, eq=False)
class Shard(ABC):
    """One parameter as seen from this rank.

    Each kind of parameter has a class of its own, which reads the current local tensors. The
    offsets of `region` count elements in logical order, whatever the strides of these tensors.
    There is one for every parameter of a model, 100 000 of them in some: what parameters of one
    kind have in common is shared, and nothing is kept in closures or dictionaries.
    """

    copied: ClassVar[bool] = False
    """Whether `weight()` and `grad()` return copies on the host; see `host_copies.py`."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    gate: torch.Tensor
    """The tensor whose `requires_grad` says whether the parameter is trained."""
    parameter: torch.Tensor | None
    """The tensor that an optimizer may own for this shard; None for an absent shard."""
    paths: tuple[str, str] | None = None
    """Attribute paths from `parameter` to weight ("" for itself) and gradient, for the native
    probe; None where `weight()` and `grad()` do more than read attributes."""
    sharding: str = ""
    """Shards with the same sharding are replicated over the same ranks, if at all."""
    may_be_partial: bool = False
    """Whether the gradient may be partial, that is, still has to be added over ranks."""
    model: weakref.ref[nn.Module] | None = None
    """The model, where `path` leads to the trained parameter in it, or, with a wrapper that shards,
    at times to another kind of tensor. A weak reference: a monitor ends with its model."""
    path: str = ""
    """Path of the parameter in `model`."""

    @abstractmethod
    def weight(self) -> torch.Tensor:
        """Return the current local weight, without copying unless `copied`."""

    @abstractmethod
    def grad(self) -> torch.Tensor | None:
        """Return the current local gradient, without copying unless `copied`.

        None when the parameter has no gradient, or none that can be read element by element.
        """

    def grad_is_unreadable(self) -> bool:
        """Return whether there is a gradient that `grad` and `sparse_grad` cannot return."""
        return False

    def sparse_grad(self) -> torch.Tensor | None:
        """Return the gradient where it is a sparse COO tensor, which is read through its values."""
        return None

    def partial_count(self) -> int:
        """Return the number of ranks whose partial gradients add up to the true one.

        1 when the gradient is complete.
        """
        return 1

    def requires_grad(self) -> bool:
        """Return whether the parameter is trained now; it may change during a run."""
        return self.gate.requires_grad

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return prod(self.global_shape)


def description(shard: Shard) -> dict[str, Any]:
    """Return the fields that every kind of shard has, for another shard of the same parameter."""
    return {each.name: getattr(shard, each.name) for each in fields(Shard)}


@dataclass(slots=True, kw_only=True, eq=False)
class AbsentShard(Shard):
    """A parameter that only other ranks hold, as of another pipeline stage."""

    empty: torch.Tensor

    def weight(self) -> torch.Tensor:
        return self.empty

    def grad(self) -> None:
        return None


def absent_shard(
    name: str,
    global_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    requires_grad: bool,
    may_be_partial: bool = False,
) -> Shard:
    """Return the shard of a parameter that only other ranks hold."""
    return AbsentShard(
        name=name,
        global_shape=global_shape,
        dtype=dtype,
        region=EMPTY_REGION,
        gate=torch.empty(0, device=device, requires_grad=requires_grad),
        parameter=None,
        sharding="absent",
        may_be_partial=may_be_partial,
        empty=torch.empty(0, dtype=dtype, device=device),
    )

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
    """The whole parameter is here: unwrapped models and DDP."""

    def local(self, indices: Indices) -> Indices:
        return indices

    def key(self) -> str:
        return "all"


@dataclass(frozen=True)
class Shard:
    """One parameter as seen from this rank.

    `weight()` and `grad()` return the current local tensors without copying; `grad()` is None when
    the parameter has no gradient. Both are in the order that `region` speaks of, whatever their
    strides. `grad_is_unreadable()` says that there is a gradient all the same, but a sparse one.
    `parameters` are the tensors an optimizer may own on behalf of this shard.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    weight: Callable[[], torch.Tensor]
    grad: Callable[[], torch.Tensor | None]
    requires_grad: Callable[[], bool]
    grad_is_unreadable: Callable[[], bool]
    parameters: tuple[torch.Tensor, ...]
    is_parameter: bool = False
    """`weight()` is `parameters[0]` itself, and `grad()` its `.grad` unless that is unreadable."""

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return prod(self.global_shape)

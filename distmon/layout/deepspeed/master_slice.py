"""A parameter's elements inside a master tensor, which the inner optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distmon.layout.shard import EMPTY_REGION, Everything, FlatRange, Region, Shard


@dataclass(frozen=True)
class MasterSlice:
    """The elements `begin` to `begin + length` of `master`, which belong to one parameter.

    `master` is the same tensor for the life of the engine, but its storage may change when states
    are offloaded, so views of it are made on every call.
    """

    master: torch.Tensor
    begin: int
    length: int
    region: Region
    sharding: str
    pending_grad: Callable[[], torch.Tensor | None]
    """Returns the same elements of the gradient before the step, neither unscaled nor clipped;
    `master.grad` exists only while the inner optimizer steps. Used to find non-finite values."""


def flat_region(start: int, length: int, numel: int) -> Region:
    """Return the region of `length` elements of a parameter, starting at `start`."""
    if length <= 0:
        return EMPTY_REGION
    return Everything() if length == numel else FlatRange(start, start + length)


def master_slice_shard(
    name: str, shape: tuple[int, ...], parameter: torch.Tensor, master_slice: MasterSlice
) -> Shard:
    """Return the shard of a parameter whose values are a slice of a master tensor."""
    return MasterSliceShard(
        name=name,
        global_shape=shape,
        dtype=master_slice.master.dtype,
        region=master_slice.region,
        gate=parameter,
        parameter=master_slice.master,
        sharding=master_slice.sharding,
        held=master_slice,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class MasterSliceShard(Shard):
    """A parameter whose values are a slice of a master tensor."""

    held: MasterSlice

    def weight(self) -> torch.Tensor:
        held = self.held
        return held.master.detach().view(-1)[held.begin : held.begin + held.length]

    def grad(self) -> torch.Tensor | None:
        held = self.held
        if not held.length:
            return None
        gradient = held.master.grad
        if gradient is None:
            return held.pending_grad()
        return gradient.view(-1)[held.begin : held.begin + held.length]

"""One parameter's elements inside a tensor that the inner optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distmon.layout.shard import NOWHERE, Everything, FlatRange, Region, Shard


@dataclass(frozen=True)
class Piece:
    """The elements `begin` to `begin + length` of `master` belong to one parameter.

    `master` keeps its identity for the life of the engine, but not its address: states can be
    moved to the host and back, so nothing is cut out of it before it is asked for.
    """

    master: torch.Tensor
    begin: int
    length: int
    region: Region
    spread: str
    waiting: Callable[[], torch.Tensor | None]
    """The same elements of the gradient that waits for the step; `master.grad` exists only while
    the inner optimizer steps. It is not yet unscaled or clipped: good to find a NaN in."""

    def weight(self) -> torch.Tensor:
        return self.master.detach().view(-1)[self.begin : self.begin + self.length]

    def grad(self) -> torch.Tensor | None:
        if not self.length:
            return None
        gradient = self.master.grad
        if gradient is None:
            return self.waiting()
        return gradient.view(-1)[self.begin : self.begin + self.length]


def flat_region(start: int, length: int, numel: int) -> Region:
    """The region of `length` elements of a parameter from `start` on."""
    if length <= 0:
        return NOWHERE
    return Everything() if length == numel else FlatRange(start, start + length)


def piece_shard(name: str, shape: tuple[int, ...], parameter: torch.Tensor, piece: Piece) -> Shard:
    """The shard of a parameter that the optimizer owns through a piece of another tensor."""
    return Shard(
        name=name,
        global_shape=shape,
        dtype=piece.master.dtype,
        region=piece.region,
        weight=piece.weight,
        grad=piece.grad,
        gate=parameter,
        grad_is_unreadable=lambda: False,
        parameters=(piece.master,),
        spread=piece.spread,
    )

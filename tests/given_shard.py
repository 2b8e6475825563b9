"""A shard that reads what a test gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distmon.layout.shard import Region, Shard


@dataclass(slots=True, kw_only=True, eq=False)
class GivenShard(Shard):
    """A parameter that is no tensor of a model."""

    read_weight: Callable[[], torch.Tensor]
    read_grad: Callable[[], torch.Tensor | None]

    def weight(self) -> torch.Tensor:
        return self.read_weight()

    def grad(self) -> torch.Tensor | None:
        return self.read_grad()


def given_shard(
    name: str,
    shape: tuple[int, ...],
    region: Region,
    weight: Callable[[], torch.Tensor] = lambda: torch.empty(0),
    grad: Callable[[], torch.Tensor | None] = lambda: None,
    dtype: torch.dtype = torch.float32,
) -> GivenShard:
    """Return a shard that no optimizer owns."""
    return GivenShard(
        name=name,
        global_shape=shape,
        dtype=dtype,
        region=region,
        gate=torch.ones(1, requires_grad=True),
        parameter=None,
        read_weight=weight,
        read_grad=grad,
    )

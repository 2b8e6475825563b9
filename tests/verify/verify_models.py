"""Factories for `distmon verify --model verify_models:...`: good ones and broken ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Batch = Callable[[int], torch.Tensor]


def rows_of(count: int) -> Batch:
    """Batches of `count` rows."""

    def batch(step: int) -> torch.Tensor:
        return torch.randn(count, 24, generator=torch.Generator().manual_seed(step))

    return batch


def sequence() -> tuple[nn.Module, Batch]:
    """A model that is a sequence of layers."""
    return nn.Sequential(nn.Linear(24, 60), nn.Tanh(), nn.Linear(60, 5)), rows_of(8)


class KeyBias(nn.Module):
    """Attention with a bias on its keys, which cancels: its gradient is rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (4, 6))
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ x


def key_bias() -> tuple[nn.Module, Batch, Any]:
    """With a loss of its own."""
    return KeyBias(), rows_of(8), lambda output, batch: (output.sum(1) - batch[:, :6]).abs().mean()


class Tied(nn.Module):
    """Two children share a weight, so neither can be wrapped alone; one parameter has no module."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(24, 24), nn.Linear(24, 24)
        self.up.weight = self.down.weight
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(self.down(x))) * self.gain


def tied() -> tuple[nn.Module, Batch]:
    """No sequence, no plan."""
    return Tied(), rows_of(8)


class DiffersByRank(nn.Linear):
    """What no wrapper can make equal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + (dist.get_rank() if dist.is_initialized() else 0))


def differs_by_rank() -> tuple[nn.Module, Batch]:
    """Trains, but not like the unsharded model."""
    return nn.Sequential(nn.Linear(24, 30), DiffersByRank(30, 5)), rows_of(8)


class FailsOnce(nn.Linear):
    """Raises on rank 1 while the other ranks wait for it, until there is a file `marker`."""

    def __init__(self, marker: str) -> None:
        super().__init__(30, 5)
        self.marker = Path(marker)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("out of luck")
        return super().forward(x)


def fails_once(marker: str) -> tuple[nn.Module, Batch]:
    """What a factory that knows a file name returns."""
    return nn.Sequential(nn.Linear(24, 30), FailsOnce(marker)), rows_of(8)


class Dies(nn.Linear):
    """Takes its process down without a word."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 0:
            os.write(2, b"the last thing it said\n")
            os._exit(7)
        return super().forward(x)


def dies() -> tuple[nn.Module, Batch]:
    """Ends rank 0."""
    return nn.Sequential(Dies(24, 30)), rows_of(8)


def odd_rows() -> tuple[nn.Module, Batch]:
    """A batch that two ranks cannot share."""
    return nn.Linear(24, 2), rows_of(7)


def no_tuple() -> nn.Module:
    """Forgets the data."""
    return nn.Linear(24, 2)


def no_model() -> tuple[str, Batch]:
    """Has data only."""
    return "model", rows_of(8)


def raises() -> None:
    """Fails by itself."""
    raise ValueError("no such dataset")


def wrong_shape() -> tuple[nn.Module, Batch]:
    """Cannot be trained at all."""
    return nn.Linear(25, 2), rows_of(8)


not_a_function = 3

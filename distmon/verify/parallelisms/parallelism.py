"""A parallelism: one way to distribute a model over ranks and train it step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.errors import DistmonError
from distmon.layout.shard import Shard
from distmon.verify.parallelisms.workload import Workload


class UnsupportedModelError(DistmonError):
    """The parallelism does not support this model; the message gives the reason."""


@dataclass(frozen=True)
class Limits:
    """Largest allowed relative difference from the unsharded float64 model."""

    weights: float = 1e-6
    updates: float = 1e-6
    gradients: float = 1e-5
    loss: float = 1e-9
    bins: float = 0.0
    """Fraction of a parameter's sampled gradients that may be in another bin, or become zero."""
    unowned_gradients: bool = True
    """Whether ranks also average the gradients of parameters that no optimizer owns. If not, these
    are not compared."""


EXACT = Limits()
BF16 = Limits(weights=0.05, updates=0.1, gradients=0.1, loss=0.02, bins=0.5)
"""bfloat16 has 8 bits of precision: one rounding is 0.4%, and a backward pass rounds several times.
A bias that starts at zero is the sum of its updates; a bin is 12 to 25% wide."""


@dataclass(frozen=True)
class DistributedModel:
    """A distributed model on this rank."""

    modules: list[nn.Module]
    """The modules that the monitor is attached to."""
    optimizers: list[torch.optim.Optimizer]
    backward: Callable[[int], torch.Tensor | None]
    """Runs forward and backward of a step on this rank's part of the global batch, and leaves the
    gradients of the global batch. Returns the loss of the local part; None on a rank that computes
    none."""
    shards: Callable[[], list[Shard]] | None = None
    """Returns this rank's shards; None to capture them from `modules`."""
    groups: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    """Returns the user's param groups; None to use those of `optimizers`."""
    step: Callable[[], None] | None = None
    """Steps the optimizers; None to call `step` of each optimizer."""
    calls_modules: bool = True
    """Whether `backward` calls `modules`, so that their activations can be compared."""
    close: Callable[[], None] | None = None
    """Frees resources before the next parallelism runs."""


@dataclass(frozen=True)
class Parallelism:
    """One way to distribute a model.

    `build` is called on every rank with the same unsharded model and may make process groups. It
    raises `UnsupportedModelError` on all ranks for a model that it cannot distribute.
    """

    name: str
    summary: str
    build: Callable[[Workload], DistributedModel]
    min_ranks: int = 2
    rank_multiple: int = 1
    """The number of ranks must be a multiple of this."""
    limits: Limits = EXACT

    def unsupported_reason(self, ranks: int) -> str:
        """Return why it cannot run on this number of ranks; empty when it can."""
        if ranks < self.min_ranks:
            return f"needs at least {self.min_ranks} ranks"
        if ranks % self.rank_multiple:
            return f"needs a multiple of {self.rank_multiple} ranks"
        return ""


def single_module(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    part: Callable[[torch.Tensor], torch.Tensor],
) -> DistributedModel:
    """Return the usual case: one module that is called on `part` of the batch."""

    def backward(step: int) -> torch.Tensor:
        mine = part(workload.batch(step))
        loss = workload.loss(module(mine), mine)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return DistributedModel([module], [optimizer], backward)

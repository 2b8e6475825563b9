"""An arrangement: one way to distribute a model over ranks, ready to be trained step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.errors import DistmonError
from distmon.layout.arrangements.workload import Workload
from distmon.layout.shard import Shard


class CannotArrangeError(DistmonError):
    """This model cannot be distributed in this way; the sentence says why."""


@dataclass(frozen=True)
class Limits:
    """Largest relative difference from the unsharded float64 model that is no error."""

    weights: float = 1e-6
    updates: float = 1e-6
    gradients: float = 1e-5
    loss: float = 1e-9
    bins: float = 0.0
    """Share of a parameter's sampled gradients that may lie in another bin, or become zero."""
    unowned_gradients: bool = True
    """Whether ranks average also the gradients of parameters that no optimizer owns. Otherwise
    nothing is said of those."""


EXACT = Limits()
BF16 = Limits(weights=0.05, updates=0.1, gradients=0.1, loss=0.02, bins=0.5)
"""bfloat16 keeps 8 bits: one rounding is 0.4%, and a backward pass rounds several times over. A
bias that starts from zero is nothing but its updates; a bin is 12 to 25% wide."""


@dataclass(frozen=True)
class Arranged:
    """A distributed model on this rank."""

    modules: list[nn.Module]
    """What the monitor is attached to."""
    optimizers: list[torch.optim.Optimizer]
    backward: Callable[[int], torch.Tensor | None]
    """Forward and backward of a step on this rank's part of the global batch; afterwards the
    gradients are those of the global batch. Returns the loss of that part, None on a rank that
    computes none."""
    shards: Callable[[], list[Shard]] | None = None
    """What this rank holds, where a look at the modules does not tell."""
    groups: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    """The param groups as they were set up, where those of the optimizers are others."""
    step: Callable[[], None] | None = None
    """Steps the optimizers, where something around them does."""
    close: Callable[[], None] | None = None
    """Gives back what would get into the way of the next arrangement."""


@dataclass(frozen=True)
class Arrangement:
    """One way to distribute a model.

    `build` is called on every rank with the same whole model and may make process groups. It raises
    `CannotArrangeError` on every rank alike for a model that does not fit.
    """

    name: str
    summary: str
    build: Callable[[Workload], Arranged]
    at_least: int = 2
    """Ranks it needs."""
    multiple_of: int = 1
    """What the number of ranks must be a multiple of."""
    limits: Limits = EXACT

    def misfit(self, ranks: int) -> str:
        """Why it cannot run on so many ranks; empty when it can."""
        if ranks < self.at_least:
            return f"needs at least {self.at_least} ranks"
        if ranks % self.multiple_of:
            return f"needs a multiple of {self.multiple_of} ranks"
        return ""


def single_module(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    part: Callable[[torch.Tensor], torch.Tensor],
) -> Arranged:
    """The usual case: one module that is called on a part of the batch."""

    def backward(step: int) -> torch.Tensor:
        mine = part(workload.batch(step))
        loss = workload.loss(module(mine), mine)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Arranged([module], [optimizer], backward)

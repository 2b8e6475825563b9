"""What a contender is: something that watches a training step, in the same way for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import nn

Timing = Literal["directly", "whole step"]
"""`directly`: the time is that of its calls, and of its hooks where it knows it. `whole step`: its
work is spread over forward and backward, so it is what its step takes longer than a bare step."""


@dataclass(frozen=True)
class Norms:
    """What a contender found out about one parameter; None for what it does not look at.

    The errors are 0 where every element was read. Otherwise they are standard errors, or, when
    `certain`, as far as the truth can be away at most.
    """

    weight: float | None = None
    """Before or after the step."""
    grad: float | None = None
    update: float | None = None
    weight_error: float = 0.0
    grad_error: float = 0.0
    update_error: float = 0.0
    certain: bool = False


Answer = Mapping[str, Norms]
"""By parameter name, of the last step that was observed."""


class Session:
    """A contender at work on one model. It is attached asleep: nothing is watched before `wake`.

    A turn is `wake`, forward, backward, `before_step`, the optimizer's step, `after_step`, `sleep`.
    Only what happens between `wake` and `sleep` is timed. This class does nothing at all.
    """

    def wake(self) -> None:
        """The coming step is to be observed."""

    def before_step(self) -> None:
        """Gradients are there, the weights are still the old ones."""

    def after_step(self, loss: torch.Tensor) -> None:
        """The optimizer has made its step."""

    def sleep(self) -> None:
        """The coming steps belong to others; it must not slow them down."""

    def hook_seconds(self) -> float:
        """Time in this turn that its hooks took in forward and backward, where it is known.

        0 for a contender whose timing is `whole step`.
        """
        return 0.0

    def off_interval(self) -> Session | None:
        """The same at a step that it does not observe; None for what is not there then at all."""
        return None

    def detach(self) -> None:
        """Take everything off the model and close files."""

    def answer(self) -> Answer:
        """What it found in its last turn. After `detach`."""
        return {}

    def tags(self) -> int | None:
        """Distinct names that one observation writes; None when it writes no file.

        After `detach`.
        """
        return None


@dataclass(frozen=True)
class Watched:
    """What a contender is given."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    """Where it may write; it exists."""


@dataclass(frozen=True)
class Contender:
    """A way to watch a training."""

    name: str
    description: str
    timing: Timing
    begin: Callable[[Watched], Session]
    finds: tuple[str, ...] = ()
    """Of weight, grad and update, those whose norm its answer names for every parameter."""
    in_growth: bool = True
    """Whether it takes part in the workloads that show how costs grow."""
    package: str | None = None
    """What must be importable for it."""
    install: str = ""
    """The command that installs that."""

    def unavailable(self) -> str | None:
        """Why it cannot run here; None when it can."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed: {self.install}"

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Session:
        """Begin to watch, asleep; whatever it writes goes into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        return self.begin(Watched(model, optimizer, folder))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that learn, by the names that they have in the model before it is wrapped for DDP."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module."), parameter

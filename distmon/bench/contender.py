"""Define a contender: one way to monitor a training step, used in the same way as all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import nn

Timing = Literal["directly", "whole step"]
"""`directly`: the time of its calls, and of its hooks where it measures them. `whole step`: its
work is spread over forward and backward, so its time is that of its step minus a bare step's."""


@dataclass(frozen=True)
class Norms:
    """What a contender reports about one parameter; None for what it does not measure.

    An error of 0 means that every element was read. Otherwise it is a standard error, or a maximum
    absolute error when `certain`.
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
"""By parameter name, for the last observed step."""


class Session:
    """A contender attached to one model; disabled until `enable`. This base class does nothing.

    A step is `enable`, forward, backward, `before_step`, optimizer step, `after_step`, `disable`.
    Only what happens between `enable` and `disable` is timed.
    """

    def enable(self) -> None:
        """Observe the coming step."""

    def before_step(self) -> None:
        """Run just before the optimizer step: gradients exist, weights are still the old ones."""

    def after_step(self, loss: torch.Tensor) -> None:
        """Run just after the optimizer step."""

    def disable(self) -> None:
        """Leave the coming steps to other contenders, without slowing them down."""

    def settle(self) -> None:
        """Wait until what was observed is reduced and evaluated. Not timed."""

    def hook_seconds(self) -> float:
        """Return the time of its hooks in this step, where they are timed.

        0 for a contender whose timing is `whole step`.
        """
        return 0.0

    def unobserved(self) -> Session | None:
        """Return a session for a step that is not observed; None when such a step costs nothing."""
        return None

    def detach(self) -> None:
        """Remove everything from the model and close files."""

    def answer(self) -> Answer:
        """Return what was measured in the last step. Called after `detach`."""
        return {}

    def tags(self) -> int | None:
        """Return how many distinct names one observation writes; None when it writes no file.

        Called after `detach`.
        """
        return None


@dataclass(frozen=True)
class Observed:
    """What a contender is attached to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    """Where it may write; it exists."""


@dataclass(frozen=True)
class Contender:
    """A way to monitor training. Picklable: memory is measured in another process."""

    name: str
    description: str
    timing: Timing
    begin: Callable[[Observed], Session]
    finds: tuple[str, ...] = ()
    """Of weight, grad and update: the norms that its answer has for every parameter."""
    in_growth: bool = True
    """Whether it takes part in the workloads that show how costs grow."""
    package: str | None = None
    """What must be importable for it."""
    install: str = ""
    """The command that installs that."""

    def unavailable(self) -> str | None:
        """Return why it cannot run here; None when it can."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed: {self.install}"

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Session:
        """Attach to a model, disabled; whatever it writes goes into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        return self.begin(Observed(model, optimizer, folder))


def bare_session(_: Observed) -> Session:
    """Return a session that does nothing."""
    return Session()


NONE = Contender("none", "the bare training step", "whole step", bare_session)


def find(names: Iterable[str], contenders: Sequence[Contender]) -> list[Contender]:
    """Return the contenders of these names, in their own order; a KeyError lists unknown names."""
    wanted = set(names)
    if unknown := wanted - {contender.name for contender in contenders}:
        raise KeyError(", ".join(sorted(unknown)))
    return [contender for contender in contenders if contender.name in wanted]


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that learn, named as in the model before it was wrapped."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("module."), parameter

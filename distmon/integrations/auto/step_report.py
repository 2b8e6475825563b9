"""Loss and gradient norm of each step of a loop, and when the step is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distmon.collect.ownership import unwrap_optimizer
from distmon.monitor import Monitor


class StepReport:
    """Collects the loss and the gradient norm of the step that is running, for one monitor.

    The loss of a step is the sum over its backward passes: with gradient accumulation each has its
    share of it. The first backward pass after a step of any optimizer begins anew.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.monitor = monitor
        self.optimizers = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        self._loss: torch.Tensor | None = None
        self._previous: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._is_old = False
        self._in_step = self._evaluated = False
        self._clipped: tuple[int, ...] = ()
        self._clips_all = False

    def loss(self, value: torch.Tensor) -> None:
        """Add the loss of a backward pass."""
        value = value.reshape(())
        if self._in_step and self._evaluated:
            return  # the closure of an optimizer is evaluated again
        self._evaluated = self._in_step
        if self._is_old:
            self._previous, self._loss, self._is_old = self._loss, None, False
        self._loss = value.clone() if self._loss is None else self._loss + value

    def grad_norm(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Keep the norm, and check it before clipping, if it is that of all trained parameters."""
        groups = [group["params"] for o in self.optimizers for group in o.param_groups]
        key = (len(parameters), id(parameters[0]), id(parameters[-1]), sum(map(len, groups)))
        if key != self._clipped:
            clipped = {id(p) for p in parameters}
            missing = (p for group in groups for p in group if id(p) not in clipped)
            self._clipped = key
            self._clips_all = all(p.grad is None for p in missing)
        if self._clips_all:
            self._norm = norm
            self.monitor.check(grad_norm=norm)

    def optimizer_begins(self, optimizer: Any) -> None:  # noqa: ARG002
        """Note that an optimizer begins its step, within which it may evaluate a closure."""
        self._in_step, self._evaluated = True, False

    def optimizer_stepped(self, optimizer: Any) -> None:  # noqa: ARG002
        """Note that an optimizer has stepped: the next backward pass belongs to another step."""
        self._in_step, self._is_old = False, True

    def scaler_stepped(self, optimizer: Any) -> None:
        """Note that a `GradScaler` has stepped `optimizer`, or skipped its step."""

    def complete(self, **numbers: Any) -> None:
        """Complete the step; `numbers` are arguments of `Monitor.step`."""
        loss, self._loss = self._loss, None
        norm, self._norm = self._norm, None
        self.monitor.step(loss=loss, grad_norm=norm, **numbers)


class AutoStep(StepReport):
    """Completes a step when each optimizer has stepped once, or one of them a second time.

    A step that a `GradScaler` skips is a step too.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(monitor, optimizers)
        self._stepped: set[int] = set()
        self._ran: set[int] = set()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note that one of the optimizers has stepped; complete the step after the last of them."""
        super().optimizer_stepped(optimizer)
        if self._trains(optimizer):
            self._ran.add(id(optimizer))
            self._count(optimizer)

    def scaler_stepped(self, optimizer: Any) -> None:
        """Count the step of an optimizer whose hooks have not run: it was skipped."""
        optimizer = unwrap_optimizer(optimizer)
        if id(optimizer) in self._ran:
            self._ran.discard(id(optimizer))
        elif self._trains(optimizer):
            super().optimizer_stepped(optimizer)
            self._count(optimizer)

    def _trains(self, optimizer: Any) -> bool:
        return any(optimizer is each for each in self.optimizers)

    def _count(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped:  # a second time, before the others
            self._stepped.clear()
            self.monitor.step(loss=self._previous)  # the newest loss is that of this step
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self.complete()

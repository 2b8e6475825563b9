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
    share of it. The first backward pass after a step of any optimizer begins anew, and so does the
    first after gradients were cleared: what was cleared is in no step.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.monitor = monitor
        self.optimizers = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self.completed = 0
        self.has_loss = False
        """Whether any step so far had one."""
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
            self._loss, self._is_old = None, False
        self._loss = value.clone() if self._loss is None else self._loss + value

    def grad_norm(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Keep the norm, and check it before clipping, if it is that of all trained parameters."""
        if not parameters:
            return
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

    def gradients_cleared(self, optimizer: Any) -> None:
        """Note that the gradients of `optimizer` were cleared."""
        if not self._in_step and self._trains(optimizer):
            self._is_old = True

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
        self.completed += 1
        self.has_loss |= loss is not None
        norm, self._norm = self._norm, None
        self.monitor.step(loss=loss, grad_norm=norm, **numbers)

    def _trains(self, optimizer: Any) -> bool:
        return any(optimizer is each for each in self.optimizers)


class AutoStep(StepReport):
    """Completes a step when each optimizer has stepped once, or one of them a second time.

    An optimizer that has never stepped is not waited for any more after the first step without it.
    A step that a `GradScaler` skips is a step too.
    """

    def __init__(
        self,
        monitor: Monitor,
        optimizers: Sequence[torch.optim.Optimizer],
        completed: int | None = None,
    ) -> None:
        """`completed`: steps that the training had completed before, where that is known."""
        super().__init__(monitor, optimizers)
        self._first = None if completed is None else completed + 1
        self._awaited = {id(optimizer) for optimizer in self.optimizers}
        self._known: set[int] = set()
        """Optimizers that have stepped."""
        self._stepped: set[int] = set()
        """Optimizers that have stepped in the step that is running."""
        self._ran: set[int] = set()
        self._pending: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        """Loss and norm of a step in which not every optimizer has stepped yet."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """Complete the step in which this optimizer has stepped already, before it does so again.

        Call it before the monitor's own hook: that one then measures a step of its own.
        """
        super().optimizer_begins(optimizer)
        self._complete_earlier(optimizer)

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

    def complete(self, **numbers: Any) -> None:
        """Complete the step, the first one with its number."""
        first, self._first = self._first, None
        super().complete(**({} if first is None else {"step": first}), **numbers)

    def _complete_earlier(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped:  # a second time, before the others
            newest = self._loss, self._norm
            self._loss, self._norm = self._pending
            self._stepped.clear()
            self.complete()
            self._loss, self._norm = newest
            self._awaited = self._known

    def _count(self, optimizer: Any) -> None:
        self._complete_earlier(optimizer)  # where a scaler skips its step, it has not begun one
        self._stepped.add(id(optimizer))
        self._known.add(id(optimizer))
        if self._awaited <= self._stepped:
            self._stepped.clear()
            self.complete()
        else:
            self._pending = self._loss, self._norm

"""Hooks on a model that tell where the phases of a step begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from distmon.telemetry.phases import PhaseClock


class Removable(Protocol):
    """Something that was put on a model."""

    def remove(self) -> None:
        """Take it off again."""


def mark_phases(model: nn.Module, clock: PhaseClock) -> list[Removable]:
    """Let the calls of the whole model tell where forward and backward begin and end.

    A call without gradients is an evaluation: neither it nor what follows, until the next training
    step begins, is time that training took to get its data.
    """
    last: LastGradient | None = None
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if isinstance(inner, DistributedDataParallel):
        # It sends gradients while backward goes on, and waits for them when the last is there.
        # Those who share weights as well wait in between: there nothing tells them apart.
        last = LastGradient(inner.parameters(), lambda: clock.enter("communication"))

    def begin(*_: object) -> None:
        if not torch.compiler.is_compiling():
            clock.enter("forward" if torch.is_grad_enabled() else "other")
            if last is not None:
                last.settle()

    def end(*_: object) -> None:
        if not torch.compiler.is_compiling():
            clock.enter("backward" if torch.is_grad_enabled() else "other")

    handles: list[Removable] = [
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end),
    ]
    return handles if last is None else [*handles, last]


class LastGradient:
    """Calls `then` when the last gradient of a backward pass is there.

    Which parameter has it shows in the first backward pass; after that no other has a hook.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], then: Callable[[], None]) -> None:
        self._then = then
        self._newest: torch.Tensor | None = None
        self._settled = False
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._seen)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def settle(self) -> None:
        """Called when no backward pass runs."""
        if self._settled or self._newest is None:
            return
        self.remove()
        self._settled = True
        put = self._newest.register_post_accumulate_grad_hook
        self._handles = [put(lambda _: self._then())]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _seen(self, parameter: torch.Tensor) -> None:
        self._newest = parameter

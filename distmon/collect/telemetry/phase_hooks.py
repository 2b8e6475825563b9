"""Hooks on a model that mark the beginning of the phases of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distmon.collect.telemetry.phases import PhaseClock
from distmon.layout import parameters_reduced_during_backward


class Removable(Protocol):
    """A handle of installed hooks."""

    def remove(self) -> None:
        """Remove the hooks."""


def install_phase_hooks(model: nn.Module, clock: PhaseClock) -> Iterator[Removable]:
    """Install hooks on the whole model that mark the phases forward, backward and communication.

    Yields each hook once it is installed, so that the caller can remove it when the next one fails.

    A call without gradients is an evaluation; it and the time after it, until the next training
    forward, count as `other`, not as waiting for data.
    """
    last: LastGradient | None = None
    if overlapped := parameters_reduced_during_backward(model):
        last = LastGradient(overlapped, lambda: clock.enter("communication"))
        yield last

    def begin(*_: object) -> None:
        if not torch.compiler.is_compiling():
            clock.enter("forward" if torch.is_grad_enabled() else "other")
            if last is not None:
                last.keep_last_hook()

    def end(*_: object) -> None:
        if not torch.compiler.is_compiling():
            clock.enter("backward" if torch.is_grad_enabled() else "other")

    yield model.register_forward_pre_hook(begin, prepend=True)
    yield model.register_forward_hook(end)


class LastGradient:
    """Calls `then` when the last gradient of a backward pass is accumulated.

    The first backward pass shows which parameter is last; after it, only that one keeps a hook.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], then: Callable[[], None]) -> None:
        self._then = then
        self._newest: torch.Tensor | None = None
        self._is_known = False
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def keep_last_hook(self) -> None:
        """Keep only the hook of the last parameter, once known. Call it outside a backward pass."""
        if self._is_known or self._newest is None:
            return
        self.remove()
        self._is_known = True
        register = self._newest.register_post_accumulate_grad_hook
        self._handles = [register(lambda _: self._then())]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _note(self, parameter: torch.Tensor) -> None:
        self._newest = parameter

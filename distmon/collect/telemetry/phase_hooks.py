"""Hooks on a model that mark the beginning of the phases of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distmon.collect.own_hooks import OwnHook
from distmon.collect.telemetry.phases import EVALUATION, PhaseClock
from distmon.layout import parameters_reduced_during_backward


class Removable(Protocol):
    """A handle of installed hooks."""

    def remove(self) -> None:
        """Remove the hooks."""


def install_phase_hooks(
    model: nn.Module, clock: PhaseClock, owner: object = None
) -> Iterator[Removable]:
    """Install hooks on the whole model that mark the phases forward, backward and communication.

    Yields each hook once it is installed, so that the caller can remove it when the next one fails.
    `owner` is the monitor that they belong to.

    A call in evaluation mode or without gradients is an evaluation; it and the time after it, until
    the next training forward, count as `other`.
    """
    last: LastGradient | None = None
    if overlapped := parameters_reduced_during_backward(model):
        last = LastGradient(overlapped, lambda: clock.enter("communication"))
        yield last
    yield model.register_forward_pre_hook(PhaseMark(clock, "forward", owner, last), prepend=True)
    yield model.register_forward_hook(PhaseMark(clock, "backward", owner))


class PhaseMark(OwnHook):
    """Forward hook of the whole model: begins a phase."""

    def __init__(
        self, clock: PhaseClock, phase: str, owner: object, last: LastGradient | None = None
    ) -> None:
        self.owner = owner
        self._clock = clock
        self._phase = phase
        self._last = last

    def __call__(self, model: nn.Module, *_: object) -> None:
        """Begin the phase, or an evaluation."""
        if torch.compiler.is_compiling():
            return
        trains = model.training and torch.is_grad_enabled()
        self._clock.enter(self._phase if trains else EVALUATION)
        if self._last is not None:
            self._last.keep_last_hook()


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

"""Hooks on a model that mark the beginning of the phases of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Final

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from distmon.collect.own_hooks import OWNER, Calls, KeptHook, OwnHook, Removable
from distmon.collect.telemetry.phases import EVALUATION, PHASE_NUMBERS, PhaseClock
from distmon.layout import parameters_reduced_during_backward

_EVALUATION: Final = PHASE_NUMBERS[EVALUATION]


def install_phase_hooks(model: nn.Module, clock: PhaseClock) -> Iterator[Removable]:
    """Install hooks on the whole model that mark the phases forward, backward and communication.

    Yields each hook once it is installed, so that the caller can remove it when the next one fails.

    A call in evaluation mode or without gradients is an evaluation; it and the time after it, until
    the next training forward, count as `other`.
    """
    last = last_gradient_of(model, clock)
    if last is not None:
        yield last
    yield from install_phase_marks(model, clock, last)


def last_gradient_of(model: nn.Module, clock: PhaseClock) -> LastGradient | None:
    """Return the hook that begins the phase communication; None where nothing is reduced."""
    if overlapped := parameters_reduced_during_backward(model):
        return LastGradient(overlapped, clock)
    return None


def install_phase_marks(
    model: nn.Module, clock: PhaseClock, last: LastGradient | None
) -> Iterator[KeptHook]:
    """Install the hooks on the calls of the model only, and yield each."""
    mark = model.__dict__.get(OWNER)
    calls = Calls() if mark is None else mark.calls
    begin = PhaseMark(clock, "forward", calls, last)
    yield KeptHook(model.register_forward_pre_hook(begin, prepend=True), first=True)
    yield KeptHook(model.register_forward_hook(PhaseMark(clock, "backward", calls)))


class PhaseMark(OwnHook):
    """Forward hook of the whole model: begins a phase."""

    def __init__(
        self, clock: PhaseClock, phase: str, calls: Calls, last: LastGradient | None = None
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._phase = PHASE_NUMBERS[phase]
        self._last = last

    def __call__(self, model: nn.Module, *_: object) -> None:
        """Begin the phase, or an evaluation."""
        clock = self._clock
        try:
            if is_compiling():
                return
            begin = perf_counter()
            self._calls.any = True
            trains = model.training and torch.is_grad_enabled()
            phase, lane = self._phase if trains else _EVALUATION, clock.lane
            if lane is None or not lane.mark_by_hook(phase):
                clock.enter_number(phase)
            if self._last is not None:
                self._last.keep_last_hook()
            clock.hook_seconds += perf_counter() - begin
        except Exception as error:  # never into the forward pass of the user
            clock.fault = error


class LastGradient:
    """Begins the phase communication when the last gradient of a backward pass is accumulated.

    The first backward pass shows which parameter is last; after it, only that one keeps a hook.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], clock: PhaseClock) -> None:
        self._clock = clock
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
        self._handles = [register(self._communication_begins)]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _communication_begins(self, _: torch.Tensor) -> None:
        try:
            self._clock.enter("communication")
        except Exception as error:  # never into the backward pass of the user
            self._clock.fault = error

    def _note(self, parameter: torch.Tensor) -> None:
        self._newest = parameter

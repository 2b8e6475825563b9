"""A hook on every parameter that reads the norm of its gradient back, in the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch.utils.hooks import RemovableHandle

from distmon.bench.contender import (
    Answer,
    Contender,
    Norms,
    Observed,
    Session,
    trainable_parameters,
)


class HooksSession(Session):
    """Hooks that are on the parameters in its own steps only."""

    def __init__(self, observed: Observed) -> None:
        self._model = observed.model
        self._handles: list[RemovableHandle] = []
        self._found: dict[str, float] = {}
        self._seconds = 0.0

    def enable(self) -> None:
        self._found = {}
        self._seconds = 0.0
        self._handles = [
            parameter.register_hook(self._reader(name))  # type: ignore[no-untyped-call]
            for name, parameter in trainable_parameters(self._model)
        ]

    def _reader(self, name: str) -> Callable[[torch.Tensor], None]:
        def read(gradient: torch.Tensor) -> None:
            begin = time.perf_counter()
            self._found[name] = gradient.norm().item()
            self._seconds += time.perf_counter() - begin

        return read

    def disable(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def hook_seconds(self) -> float:
        return self._seconds

    def answer(self) -> Answer:
        return {
            name: Norms(grad=self._found.get(name)) for name, _ in trainable_parameters(self._model)
        }


NAIVE_HOOKS: Final = Contender(
    name="naive hooks",
    description="a hook on every parameter that reads its gradient's norm with .item()",
    timing="directly",
    begin=HooksSession,
    finds=("grad",),
    in_growth=False,
)

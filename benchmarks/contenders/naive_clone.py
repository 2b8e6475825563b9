"""The naive way: a clone of every weight, and two norms per parameter read back one by one."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distmon_benchmarks.contenders.contender import (
    Answer,
    Contender,
    Norms,
    Session,
    named_parameters,
)


class CloneSession(Session):
    """Clones before the step, subtracts after it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(named_parameters(model))
        self._before: list[torch.Tensor] = []
        self._found: dict[str, Norms] = {}

    def before_step(self) -> None:
        self._before = [p.detach().clone() for p in self._parameters.values()]

    def after_step(self, loss: torch.Tensor) -> None:
        found = {}
        for (name, p), before in zip(self._parameters.items(), self._before, strict=True):
            update = _read((p.detach() - before).norm())
            grad = None if p.grad is None else _read(p.grad.norm())
            found[name] = Norms(grad=grad, update=update)
        self._found = found
        self._before = []

    def answer(self) -> Answer:
        return self._found


def _read(norm: torch.Tensor) -> float:
    """Of a tensor that ranks share, `.item()` alone would be this rank's part."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


NAIVE_CLONE: Final = Contender(
    name="naive clone",
    description="clone all weights, subtract after the step, two .item() norms per parameter",
    timing="directly",
    begin=lambda watched: CloneSession(watched.model),
    finds=("grad", "update"),
)

"""The naive way: a clone of every weight, and two norms per parameter read back one by one."""

from __future__ import annotations

from typing import Final

import torch

from distmon.bench.contender import (
    Answer,
    Contender,
    Norms,
    Observed,
    Session,
    trainable_parameters,
)


class CloneSession(Session):
    """Clones before the step, subtracts after it."""

    def __init__(self, observed: Observed) -> None:
        self._parameters = dict(trainable_parameters(observed.model))
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
    """Return the norm over all ranks; `.item()` of a sharded tensor would be that of the shard."""
    full = getattr(norm, "full_tensor", None)
    return float((norm if full is None else full()).item())


NAIVE_CLONE: Final = Contender(
    name="naive clone",
    description="clone all weights, subtract after the step, two .item() norms per parameter",
    timing="directly",
    begin=CloneSession,
    finds=("grad", "update"),
)

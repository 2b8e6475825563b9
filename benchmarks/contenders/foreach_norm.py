"""The fastest norms that torch has: one call for a list of tensors, and nothing is read back."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from distmon_benchmarks.contenders.contender import (
    Answer,
    Contender,
    Norms,
    Session,
    named_parameters,
)


class ForeachSession(Session):
    """Keeps the norms as tensors; only `answer` reads them."""

    def __init__(self, model: nn.Module, weights: bool) -> None:
        self._parameters = dict(named_parameters(model))
        self._weights = weights
        self._grad_norms: dict[str, torch.Tensor] = {}
        self._weight_norms: dict[str, torch.Tensor] = {}

    def after_step(self, loss: torch.Tensor) -> None:
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        weights = [p.detach() for p in self._parameters.values()] if self._weights else []
        norms = torch._foreach_norm([*gradients.values(), *weights])
        self._grad_norms = dict(zip(gradients, norms, strict=False))
        self._weight_norms = dict(zip(self._parameters, norms[len(gradients) :], strict=False))

    def answer(self) -> Answer:
        return {
            name: Norms(weight=_read(self._weight_norms, name), grad=_read(self._grad_norms, name))
            for name in self._parameters
        }


def _read(norms: dict[str, torch.Tensor], name: str) -> float | None:
    return float(norms[name]) if name in norms else None


OF_GRADIENTS: Final = Contender(
    name="foreach_norm",
    description="torch._foreach_norm of all gradients, nothing read back",
    timing="directly",
    begin=lambda watched: ForeachSession(watched.model, weights=False),
    finds=("grad",),
)
OF_BOTH: Final = Contender(
    name="foreach_norm both",
    description="torch._foreach_norm of all weights and gradients, nothing read back",
    timing="directly",
    begin=lambda watched: ForeachSession(watched.model, weights=True),
    finds=("weight", "grad"),
    in_growth=False,
)

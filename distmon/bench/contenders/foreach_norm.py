"""The fastest norms in torch: one call for a list of tensors, nothing read back."""

from __future__ import annotations

from functools import partial
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


class ForeachSession(Session):
    """Keeps the norms as tensors; only `answer` reads them."""

    def __init__(self, observed: Observed, weights: bool) -> None:
        self._parameters = dict(trainable_parameters(observed.model))
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


GRADIENT_NORMS: Final = Contender(
    name="foreach_norm",
    description="torch._foreach_norm of all gradients, nothing read back",
    timing="directly",
    begin=partial(ForeachSession, weights=False),
    finds=("grad",),
)
ALL_NORMS: Final = Contender(
    name="foreach_norm both",
    description="torch._foreach_norm of all weights and gradients, nothing read back",
    timing="directly",
    begin=partial(ForeachSession, weights=True),
    finds=("weight", "grad"),
    in_growth=False,
)

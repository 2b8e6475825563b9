"""The truth about a step, in float64 from all elements: what the optimizer applied and changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn

PART: Final = 2**20
"""Elements that are widened to float64 at a time."""
QUANTITIES: Final = ("grad_norm", "update_norm", "weight_norm")
"""The per-parameter columns of a record that are compared."""


@dataclass
class StepTruth:
    """Norms by quantity and parameter; NaN for the gradient of a parameter that has none."""

    norms: dict[str, dict[str, float]] = field(
        default_factory=lambda: {quantity: {} for quantity in QUANTITIES}
    )

    @property
    def total_grad_norm(self) -> float:
        """Norm over the gradients of all parameters."""
        grads = self.norms["grad_norm"].values()
        return math.sqrt(math.fsum(norm**2 for norm in grads if not math.isnan(norm)))


class TruthHooks:
    """Computes the truth around every optimizer step while entered; tied weights appear once."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.last = StepTruth()
        """The truth about the newest step."""
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._before: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            self._optimizer.register_step_pre_hook(lambda *_: self._keep_weights()),
            self._optimizer.register_step_post_hook(lambda *_: self._compute()),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_weights(self) -> None:
        self._before = {name: p.detach().clone() for name, p in self._parameters.items()}

    def _compute(self) -> None:
        self.last = StepTruth()
        norms = self.last.norms
        for name, parameter in self._parameters.items():
            grad, weight = parameter.grad, parameter.detach()
            norms["grad_norm"][name] = math.nan if grad is None else norm64(grad.detach())
            norms["update_norm"][name] = norm64(weight, self._before[name])
            norms["weight_norm"][name] = norm64(weight)


def norm64(tensor: torch.Tensor, subtracted: torch.Tensor | None = None) -> float:
    """Return the norm of a tensor, or of its difference from another, in float64."""
    total = 0.0
    others = None if subtracted is None else subtracted.reshape(-1).split(PART)
    for i, part in enumerate(tensor.reshape(-1).split(PART)):
        wide = part.double()
        if others is not None:
            wide = wide - others[i].double()
        total += float(torch.dot(wide, wide))
    return math.sqrt(total)

"""The idea of OLMo's trainer: norm, minimum, maximum and mean of everything, per parameter."""

from __future__ import annotations

import json
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


class PerParameterSession(Session):
    """Four numbers of weight, gradient and update each, read back one by one and written."""

    def __init__(self, observed: Observed) -> None:
        self._parameters = dict(trainable_parameters(observed.model))
        self._before: list[torch.Tensor] = []
        self._metrics: dict[str, float] = {}
        self._file = (observed.folder / "metrics.jsonl").open("w", encoding="utf-8")

    def before_step(self) -> None:
        self._before = [p.detach().clone() for p in self._parameters.values()]

    def after_step(self, loss: torch.Tensor) -> None:
        metrics = {"loss": loss.item()}
        for (name, p), before in zip(self._parameters.items(), self._before, strict=True):
            metrics |= _four("param", name, p.detach())
            metrics |= _four("update", name, p.detach() - before)
            if p.grad is not None:
                metrics |= _four("grad", name, p.grad)
        self._before = []
        self._metrics = metrics
        self._file.write(json.dumps(metrics) + "\n")

    def detach(self) -> None:
        self._file.close()

    def answer(self) -> Answer:
        return {
            name: Norms(
                weight=self._metrics[f"param/{name}.norm"],
                grad=self._metrics.get(f"grad/{name}.norm"),
                update=self._metrics[f"update/{name}.norm"],
            )
            for name in self._parameters
        }

    def tags(self) -> int:
        return len(self._metrics)


def _four(what: str, name: str, tensor: torch.Tensor) -> dict[str, float]:
    return {
        f"{what}/{name}.norm": tensor.norm().item(),
        f"{what}/{name}.min": tensor.min().item(),
        f"{what}/{name}.max": tensor.max().item(),
        f"{what}/{name}.avg": tensor.mean().item(),
    }


OLMO_STYLE: Final = Contender(
    name="olmo style",
    description="norm, min, max and mean of every weight, gradient and update, by .item()",
    timing="directly",
    begin=PerParameterSession,
    finds=("weight", "grad", "update"),
    in_growth=False,
)

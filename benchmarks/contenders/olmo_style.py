"""The idea of OLMo's trainer: norm, minimum, maximum and mean of everything, per parameter."""

from __future__ import annotations

import json
from pathlib import Path
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


class PerParameterSession(Session):
    """Four numbers of weight, gradient and update each, read back one by one and written."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._parameters = dict(named_parameters(model))
        self._before: list[torch.Tensor] = []
        self._metrics: dict[str, float] = {}
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8")

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
    begin=lambda watched: PerParameterSession(watched.model, watched.folder),
    finds=("weight", "grad", "update"),
    in_growth=False,
)

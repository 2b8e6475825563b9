"""Factories as users write them, good and bad, for `distmon bench --model users_models:NAME`."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import nn


class PartlyUsed(nn.Module):
    """A frozen bias, and a layer that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.second = nn.Linear(96, 16)
        self.unused = nn.Linear(3, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def with_step() -> Any:
    """A model, and what a step of it is."""
    target = torch.randn(8, 16)

    def step(model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = (model(target) - target).square().mean()
        return loss

    return PartlyUsed(), step


def alone() -> nn.Module:
    """A model without data."""
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16))


def returns_text() -> str:
    return "model"


def returns_three() -> Any:
    return nn.Linear(2, 2), None, None


def step_is_none_of_its_kind() -> Any:
    return nn.Linear(2, 2), "step"


def raises() -> NoReturn:
    raise ValueError("no such checkpoint\nand more")


def leaves() -> NoReturn:
    sys.exit(3)


def nothing_to_learn() -> Any:
    return nn.ReLU()


def half() -> Any:
    return nn.Linear(2, 2).half()


def _loss_of(value: Any) -> Any:
    return nn.Linear(2, 2), lambda _: value


def text_loss() -> Any:
    return _loss_of("0.5")


def constant_loss() -> Any:
    return _loss_of(torch.tensor(0.5))


def vector_loss() -> Any:
    return nn.Linear(2, 2), lambda model: model(torch.ones(3, 2))


def nan_loss() -> Any:
    return nn.Linear(2, 2), lambda model: model(torch.ones(3, 2)).sum() * float("nan")


def wrong_shape() -> Any:
    return nn.Linear(2, 2), lambda model: model(torch.ones(3, 5)).sum()

"""What is trained: a model, its data, its loss, and which part of it learns how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from distmon.layout.names import clean_name

_RATES = ((1e-3, 0.0), (3e-3, 0.1), (2e-3, 0.01))
"""Learning rate and weight decay; units take turns."""


@dataclass(frozen=True)
class Workload:
    """A model that has not been distributed yet, and what to train it on."""

    model: nn.Module
    """In float64, so that the order in which ranks add things does not show."""
    batch: Callable[[int], torch.Tensor]
    """The global batch of a step, the same whoever asks; rows are examples."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(output, batch) to a scalar that is a mean over examples."""
    without_optimizer: tuple[str, ...] = ()
    """Units that ask for gradients but belong to no optimizer."""

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Paths of the modules that are wrapped on their own: the children of the model.

        Lists of modules stand for their members. Children that share a parameter cannot be wrapped
        apart, and then the model is one unit.
        """
        paths = tuple(_children(self.model))
        parameters = [p for path in paths for p in self.model.get_submodule(path).parameters()]
        shared = len({id(p) for p in parameters}) < len(parameters)
        return () if shared else paths

    def param_groups(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """The param groups of an optimizer over `named`, which wrappers may have renamed.

        One group for each unit, because a wrapper may make one tensor of all that a unit holds.
        """
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in named:
            unit = self._unit_of(clean_name(name))
            if parameter.requires_grad and unit not in self.without_optimizer:
                groups.setdefault(unit, []).append(parameter)
        places = ("", *self.units)
        result = []
        for unit, members in groups.items():
            lr, decay = _RATES[places.index(unit) % len(_RATES)]
            result.append({"params": members, "lr": lr, "weight_decay": decay})
        return result

    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """AdamW over `named`. It steps one tensor at a time: some models mix kinds of tensors."""
        return torch.optim.AdamW(self.param_groups(named), foreach=False)

    def _unit_of(self, name: str) -> str:
        """The unit that holds the parameter; "" for what the model holds itself."""
        return next((unit for unit in self.units if name.startswith(f"{unit}.")), "")


def _children(module: nn.Module, prefix: str = "") -> Iterable[str]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name


def part_of(batch: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    """Equal contiguous parts of the rows: the mean over parts is then the mean over the batch."""
    rows = len(batch) // parts
    return batch[index * rows : (index + 1) * rows]

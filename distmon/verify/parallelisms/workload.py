"""A workload: a model, its data, its loss and its param groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from distmon.layout.names import clean_name

_RATES = ((1e-3, 0.0), (3e-3, 0.1), (2e-3, 0.01))
"""Learning rate and weight decay, assigned to units in turn."""


@dataclass(frozen=True)
class Workload:
    """A model that is not distributed yet, with its data and loss."""

    model: nn.Module
    """In float64, so that the order of additions over ranks does not matter."""
    batch: Callable[[int], torch.Tensor]
    """Returns the global batch of a step, equal on every rank; dimension 0 is the example."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Maps (output, batch) to a scalar that is a mean over examples."""
    without_optimizer: tuple[str, ...] = ()
    """Units that require gradients but belong to no optimizer."""

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Paths of the modules that are wrapped individually: the children of the model.

        Module lists and dicts are replaced by their members. If children share a parameter they
        cannot be wrapped individually, and the model is one unit.
        """
        paths = tuple(_children(self.model))
        parameters = [p for path in paths for p in self.model.get_submodule(path).parameters()]
        shared = len({id(p) for p in parameters}) < len(parameters)
        return () if shared else paths

    def param_groups(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Return the param groups of an optimizer over `named`, which wrappers may have renamed.

        There is one group per unit, because a wrapper may flatten a unit into one tensor.
        """
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in named:
            unit = self._unit_of(clean_name(name))
            if parameter.requires_grad and unit not in self.without_optimizer:
                groups.setdefault(unit, []).append(parameter)
        order = ("", *self.units)
        result = []
        for unit, members in groups.items():
            lr, decay = _RATES[order.index(unit) % len(_RATES)]
            result.append({"params": members, "lr": lr, "weight_decay": decay})
        return result

    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return AdamW over `named`, without foreach because some models mix tensor types."""
        return torch.optim.AdamW(self.param_groups(named), foreach=False)

    def _unit_of(self, name: str) -> str:
        """Return the unit that holds the parameter; "" for the model itself."""
        return next((unit for unit in self.units if name.startswith(f"{unit}.")), "")


def _children(module: nn.Module, prefix: str = "") -> Iterable[str]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name


def part_of(batch: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    """Return one of `parts` equal contiguous parts of the batch."""
    rows = len(batch) // parts
    return batch[index * rows : (index + 1) * rows]

"""Which module an optimizer trains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ModelSearch:
    """Finds the root model of optimizers: from calls of modules, else among all modules.

    The first training call of a module that has all parameters of an optimizer is a call of its
    root: an outer module is called before the modules inside it.
    """

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []
        self._called: list[weakref.ref[nn.Module]] = []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose model is not known yet, in the order in which they were created."""
        found = [ref() for ref in self._optimizers]
        return [optimizer for optimizer in found if optimizer is not None]

    @property
    def has_called(self) -> bool:
        """Whether a module was called that has some of the parameters that are searched for."""
        return bool(self._called)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Search for the model of `optimizer`."""
        if all(each is not optimizer for each in self.optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def remove(self, optimizers: Sequence[Any]) -> None:
        """Search no more for the models of these optimizers."""
        ids = {id(optimizer) for optimizer in optimizers}
        self._optimizers = [ref for ref in self._optimizers if id(ref()) not in ids]
        if not self._optimizers:
            self._called = []

    def call(self, module: nn.Module) -> bool:
        """Note a training call; return whether the module is the root of an optimizer."""
        held = _parameters(module)
        for optimizer in self.optimizers:
            wanted = trained_by(optimizer)
            if wanted and wanted <= held:
                return True
            if wanted & held and all(ref() is not module for ref in self._called):
                self._called.append(weakref.ref(module))
        return False

    def trained_in(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers that train parameters of `module`."""
        held = _parameters(module)
        return [optimizer for optimizer in self.optimizers if trained_by(optimizer) & held]

    def smallest_holder(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        """Return the module with the fewest parameters that has all of `optimizer`, if any."""
        wanted = trained_by(optimizer)
        best: tuple[int, nn.Module] | None = None
        # The type, not isinstance: proxies in the heap may import packages when they are asked.
        for found in [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]:
            held = _parameters(found)
            if not wanted <= held:
                continue
            outer = best is not None and len(held) == best[0] and _contains(found, best[1])
            if best is None or len(held) < best[0] or outer:
                best = (len(held), found)
        return None if best is None else best[1]

    def called_by_hand(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """Return the outermost modules that were called and have parameters of `optimizer`."""
        wanted = trained_by(optimizer)
        called = [m for ref in self._called if (m := ref()) is not None]
        called = [module for module in called if _parameters(module) & wanted]
        return [m for m in called if not any(m is not o and _contains(o, m) for o in called)]


def trained_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the tensors in the optimizer's param groups."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(p) for group in groups for p in group["params"] if isinstance(p, torch.Tensor)}


def _parameters(module: nn.Module) -> set[int]:
    try:
        return {id(p) for p in module.parameters()}
    except Exception:  # a module in the heap that is not initialized, or not any more
        return set()


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())

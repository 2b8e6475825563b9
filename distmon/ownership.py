"""Which optimizer owns which parameter, and at which learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from distmon.errors import LayoutError
from distmon.layout import Shard
from distmon.losses import host_value, on_host

OWNERSHIP_COLUMNS = ("holders", "requires_grad", "in_optimizer", "lr", "g_unreadable")


class Ownership:
    """The table of parameters against optimizers and their param groups.

    Read anew at every observation: groups may be added and learning rates change.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
    ) -> None:
        """`groups`: the param groups of all optimizers, where the optimizers' own do not tell."""
        self.optimizers = optimizers
        self._shards = shards
        self._groups = groups or self._groups_of_optimizers
        # One tensor of an optimizer may hold pieces of many parameters.
        self._held: dict[int, list[int]] = {}
        for i, shard in enumerate(shards):
            for p in shard.parameters:
                self._held.setdefault(id(p), []).append(i)
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise LayoutError(
                    f"attach needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
                )
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            if groups is None and not any(id(p) in self._held for p in tensors):
                raise LayoutError(
                    f"none of the {len(tensors)} tensors in {type(optimizer).__name__} belongs to "
                    "the observed model: build the optimizer from this model's parameters, after "
                    "wrapping"
                )

    def columns(self) -> torch.Tensor:
        """float64 [parameters, 5] on the host, in the order of OWNERSHIP_COLUMNS."""
        table = torch.zeros((len(self._shards), len(OWNERSHIP_COLUMNS)), dtype=torch.float64)
        numbers = table.numpy()
        numbers[:, 0] = [bool(shard.parameters) for shard in self._shards]
        numbers[:, 1] = [bool(s.parameters) and s.requires_grad() for s in self._shards]
        for group in self._groups():
            lr = group.get("lr", float("nan"))
            value = host_value(lr) if on_host(lr) else float("nan")
            for row in self._rows(group["params"]):
                numbers[row, 2:4] = 1, value
        numbers[:, 4] = [shard.grad_is_unreadable() for shard in self._shards]
        return table

    def rows_of(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The parameters that this optimizer steps, according to its param groups now."""
        return {row for group in optimizer.param_groups for row in self._rows(group["params"])}

    def unowned(self) -> set[int]:
        """The parameters that no optimizer owns."""
        owned = (self._rows(group["params"]) for group in self._groups())
        return set(range(len(self._shards))).difference(*owned)

    def _groups_of_optimizers(self) -> Iterable[Mapping[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def _rows(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [row for p in tensors for row in self._held.get(id(p), ())]


def scaler_verdict(optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
    """What a GradScaler found, while a fused optimizer steps under it: 1 when the step is void.

    Such an optimizer runs its step, hooks included, even when nothing is to change; the verdict is
    a tensor on the device and must not be waited for.
    """
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else None

"""Which optimizer owns which parameter, and at which learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distmon.errors import LayoutError
from distmon.layout import Shard
from distmon.losses import host_value, on_host


class Ownership:
    """The table of parameters against optimizers and their param groups.

    Read anew at every observation: groups may be added and learning rates change.
    """

    def __init__(
        self, shards: Sequence[Shard], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._shards = shards
        self._optimizers = optimizers
        self._row = {id(p): i for i, shard in enumerate(shards) for p in shard.parameters}
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise LayoutError(
                    f"attach needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
                )
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(id(p) in self._row for p in tensors):
                raise LayoutError(
                    f"none of the {len(tensors)} tensors in {type(optimizer).__name__} belongs to "
                    "the observed model: build the optimizer from this model's parameters, after "
                    "wrapping"
                )

    def columns(self) -> torch.Tensor:
        """float64 [parameters, 4]: holders, requires_grad, in_optimizer, lr."""
        table = torch.zeros((len(self._shards), 4), dtype=torch.float64)
        numbers = table.numpy()
        numbers[:, 0] = 1
        numbers[:, 1] = [shard.requires_grad() for shard in self._shards]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                lr = group.get("lr", float("nan"))
                value = host_value(lr) if on_host(lr) else float("nan")
                for row in self._rows(group["params"]):
                    numbers[row, 2:] = 1, value
        return table

    def applied(
        self, stepped: Sequence[torch.optim.Optimizer], any_step: bool, device: torch.device
    ) -> torch.Tensor:
        """float64 [parameters]: 1 where `stepped` optimizers own it, or nobody does.

        A fused optimizer under a GradScaler runs its step even when the scaler found an Inf and
        nothing is to change; the verdict is a tensor on the device, so it is multiplied in there.
        """
        host = torch.zeros(len(self._shards), dtype=torch.float64)
        numbers = host.numpy()
        if any_step:
            numbers[:] = 1
        verdicts: list[tuple[list[int], torch.Tensor]] = []
        for optimizer in self._optimizers:
            rows = [r for g in optimizer.param_groups for r in self._rows(g["params"])]
            if not any(optimizer is s for s in stepped):
                numbers[rows] = 0
            elif isinstance(found_inf := getattr(optimizer, "found_inf", None), torch.Tensor):
                verdicts.append((rows, found_inf))
        result = host.to(device)
        for rows, found_inf in verdicts:
            result[rows] *= 1 - found_inf.to(device, torch.float64).reshape(())
        return result

    def _rows(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [self._row[id(p)] for p in tensors if id(p) in self._row]


def managed_by_scaler(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a GradScaler decides inside the step if it counts."""
    return isinstance(getattr(optimizer, "found_inf", None), torch.Tensor)

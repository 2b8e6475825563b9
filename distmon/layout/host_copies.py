"""Shards of a device without float64, read through copies on the host.

Rows of statistics are sums in float64. Where the device has none, as Apple's, whole tensors are
copied to the host at observed steps, and everything goes on as with weights on the host. Each copy
waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from distmon.layout.shard import Shard, description


@dataclass(slots=True, kw_only=True, eq=False)
class HostCopy(Shard):
    """A shard whose tensors are copies on the host."""

    copied: ClassVar[bool] = True
    shard: Shard
    """The shard on the device."""

    def weight(self) -> torch.Tensor:
        return self.shard.weight().detach().cpu()

    def grad(self) -> torch.Tensor | None:
        return _copy(self.shard.grad())

    def sparse_grad(self) -> torch.Tensor | None:
        return _copy(self.shard.sparse_grad())

    def grad_is_unreadable(self) -> bool:
        return self.shard.grad_is_unreadable()

    def partial_count(self) -> int:
        return self.shard.partial_count()


def copied_to_host(shard: Shard) -> HostCopy:
    """Return a shard whose tensors are copies on the host; the parameters stay what they are."""
    return HostCopy(**{**description(shard), "paths": None}, shard=shard)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().cpu()

"""Shards of a device without float64, read through copies on the host.

Rows of statistics are sums in float64. Where the device has none, as Apple's, whole tensors are
copied to the host at observed steps, and everything goes on as with weights on the host. Each copy
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from distmon.layout.shard import Shard


def copied_to_host(shard: Shard) -> Shard:
    """Return a shard whose tensors are copies on the host; the parameters stay what they are."""
    return replace(
        shard,
        weight=lambda: shard.weight().detach().cpu(),
        grad=_copied(shard.grad),
        sparse_grad=_copied(shard.sparse_grad),
        paths=None,
        copied=True,
    )


def _copied(read: Callable[[], torch.Tensor | None]) -> Callable[[], torch.Tensor | None]:
    def copy() -> torch.Tensor | None:
        tensor = read()
        return None if tensor is None else tensor.detach().cpu()

    return copy

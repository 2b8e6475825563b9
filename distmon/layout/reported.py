"""Numbers that the trainer reports, where they may still lie on several ranks."""

from __future__ import annotations

import torch

from distmon.errors import LayoutError

Number = float | torch.Tensor


def local_loss(value: Number) -> Number:
    """Return this rank's loss, of a DTensor its local part."""
    return value.to_local() if _is_dtensor(value) else value  # type: ignore[union-attr]


def local_norm(value: Number) -> tuple[Number, float]:
    """Return this rank's part of a reported norm and the share of its square in the total's.

    The share is 0 when the part is the total itself. `get_total_norm` of DTensors returns one that
    still has to be reduced: the square of the total is the sum of those of the ranks that hold
    different parts. It is reduced with the observation, since `check` may not enter a collective.
    """
    if not _is_dtensor(value):
        return value, 0.0
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    parts = 1
    for size, placement in zip(value.device_mesh.shape, value.placements, strict=True):
        if not placement.is_partial():
            continue
        if getattr(placement, "norm_type", None) != 2:
            raise LayoutError(f"a norm that is {placement} over ranks cannot be read; reduce it")
        parts *= size
    local = value.to_local().detach()
    return local, parts / value.device_mesh.size() if parts > 1 else 0.0


def _is_dtensor(value: object) -> bool:
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):
        return False
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)

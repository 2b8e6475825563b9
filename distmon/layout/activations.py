"""Gradients of activations that are distributed over ranks."""

from __future__ import annotations

import torch


def local_part(gradient: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return the local tensor of an activation's gradient and the number of ranks that hold it.

    Return None for a partial gradient: adding it over ranks would take a collective.
    """
    if not torch.distributed.is_available():
        return gradient, 1
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(gradient, DTensor):
        return gradient, 1
    if any(placement.is_partial() for placement in gradient.placements):
        return None
    copies = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    return gradient.to_local(), copies

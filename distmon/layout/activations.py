"""Gradients of activations that lie on several ranks."""

from __future__ import annotations

import torch


def local_part(gradient: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """This rank's part of the gradient of an activation, and how many ranks hold the same part.

    None when the ranks still have to add their parts: that would take a collective.
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

"""Activations whose units are distributed over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LocalActivation:
    """The part of an activation that this rank holds."""

    values: torch.Tensor
    dim: int
    """Dimension of the units."""
    first: int
    """Place of the first local unit among those of all ranks."""
    units: int
    """Units on all ranks."""


def local_activation(
    output: torch.Tensor, maker: nn.Module | None, channels_first: bool
) -> LocalActivation | None:
    """Return this rank's part of an activation; None for one that still has to be added up.

    Units are the last dimension, or the second one with `channels_first`. `maker` is the layer
    whose units these are: where its weight is divided by rows over ranks, so is a plain tensor
    that has as many units as the local rows. Positions may be divided as they like: a mean over
    all ranks does not depend on it.
    """
    dim = 1 if channels_first and output.dim() > 2 else output.dim() - 1
    tensor: Any = output
    if _is_distributed(output):
        if any(placement.is_partial() for placement in tensor.placements):
            return None
        first, units = _own_range(tensor, dim)
        return LocalActivation(tensor.to_local(), dim, first, units)
    local = output.shape[dim]
    weight: Any = getattr(maker, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() > 1 and _is_distributed(weight):
        first, units = _own_range(weight, 0)
        held: Any = weight
        if held._local_tensor.shape[0] == local and units != local:
            return LocalActivation(output, dim, first, units)
    return LocalActivation(output, dim, 0, local)


def _is_distributed(tensor: torch.Tensor) -> bool:
    if type(tensor) in (torch.Tensor, nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _own_range(tensor: Any, dim: int) -> tuple[int, int]:
    """Return where this rank's part of a dimension begins, and the length on all ranks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offset[dim]), int(tensor.shape[dim])

"""Add the statistics of an activation to its row: by Triton on a GPU, by torch elsewhere."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch

from distmon.collect.inside.catalog import (
    ACTIVATION_MAXIMA,
    ACTIVATION_SUMS,
    UNIT_SLOTS,
    spaced,
)
from distmon.device import on_device, to_device
from distmon.layout.units import LocalActivation

log = logging.getLogger("distmon")
UNBOUNDED: Final = (-math.inf, math.inf)
Bounds = tuple[float, float]
"""From where on, down and up, a value is saturated."""
GRAM_SAMPLES: Final = 32
_FEWEST_SAMPLES: Final = 4
_POSITIONS: Final = ACTIVATION_SUMS.index("positions")
_GRAM: Final = slice(ACTIVATION_SUMS.index("samples"), len(ACTIVATION_SUMS))
_BOUNDED: Final = ACTIVATION_MAXIMA.index("bounded")
_UNITS: Final = ACTIVATION_MAXIMA.index("units")
_SLOTS: Final = len(ACTIVATION_MAXIMA)
_STEP: Final = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio fall on no period of the data, such as the first token of every
sequence."""


def add_activation(
    part: LocalActivation, sums: torch.Tensor, maxima: torch.Tensor, bounds: Bounds
) -> None:
    """Add one activation of a forward pass; `sums` and `maxima` are the row's. Never waits."""
    with torch.no_grad():
        values = part.values.detach()
        if not values.numel() or values.dim() == 0:
            return
        shaped = _shaped(values, part.dim)
        if shaped.is_cuda and reads_by_triton(shaped.device):
            _add_by_triton(shaped, sums, maxima, part, bounds)
        else:
            _add_by_torch(shaped, sums, maxima, part, bounds)
        sums[_POSITIONS] += shaped.shape[0] * shaped.shape[2]
        _raise(maxima[_UNITS], part.units)
        if bounds != UNBOUNDED:
            _raise(maxima[_BOUNDED], 1.0)
        if shaped.shape[1] == part.units:
            _add_gram(shaped, sums[_GRAM])


@lru_cache(maxsize=64)
def reads_by_triton(device: torch.device) -> bool:
    """Return whether the kernel can be used there.

    The first call compiles it for the dtypes of activations: `attach` makes it, so that nothing
    compiles in the middle of training, and a missing compiler shows there.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    maxima = torch.zeros(_SLOTS + UNIT_SLOTS, device=device)
    sums = torch.zeros(len(ACTIVATION_SUMS), dtype=torch.float64, device=device)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            one = torch.zeros((1, 1, 1), dtype=dtype, device=device)
            _add_by_triton(one, sums, maxima, LocalActivation(one, 1, 0, 1), UNBOUNDED)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("distmon: reading activations with torch instead of Triton: %s", reason)
        return False
    return True


def _raise(cell: torch.Tensor, value: float) -> None:
    cell.clamp_(min=value)


def _shaped(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the activation as [outer, units, inner]."""
    outer = math.prod(values.shape[:dim])
    return values.reshape(outer, values.shape[dim], math.prod(values.shape[dim + 1 :]))


def _add_by_triton(
    shaped: torch.Tensor,
    sums: torch.Tensor,
    maxima: torch.Tensor,
    part: LocalActivation,
    bounds: Bounds,
) -> None:
    from csrc_triton.activation_stats import add_activation_stats

    place = (part.first, part.units)
    with on_device(shaped.device):  # Triton launches on the current one
        add_activation_stats(shaped, sums, maxima[:1], maxima[_SLOTS:], place, bounds)


def _add_by_torch(
    shaped: torch.Tensor,
    sums: torch.Tensor,
    maxima: torch.Tensor,
    part: LocalActivation,
    bounds: Bounds,
) -> None:
    if shaped.dtype not in (torch.float32, torch.float64):
        shaped = shaped.float()
    count = shaped.numel()
    sums[0] += count
    sums[1] += shaped.sum()
    sums[2] += torch.linalg.vector_norm(shaped).double().square()
    sums[3] += count - torch.count_nonzero(shaped)
    low, high = bounds
    if bounds != UNBOUNDED:
        sums[4] += torch.count_nonzero((shaped <= low) | (shaped >= high))
    by_unit = torch.maximum(shaped.amax((0, 2)), -shaped.amin((0, 2)))
    by_unit = by_unit.nan_to_num(nan=math.inf, posinf=math.inf).to(maxima.dtype)
    maxima[:1].clamp_(min=by_unit.max())
    slots, units = _own_slots(part.first, len(by_unit), part.units, shaped.device)
    if len(slots):
        into = maxima[_SLOTS:]
        into[slots] = torch.maximum(into[slots], by_unit[units])


@lru_cache(maxsize=256)
def _own_slots(
    first: int, local: int, units: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots whose unit is here, and those units."""
    chosen = np.array(spaced(units, UNIT_SLOTS), dtype=np.int64)
    here = np.flatnonzero((chosen >= first) & (chosen < first + local))
    found = (torch.from_numpy(here), torch.from_numpy(chosen[here] - first))
    return to_device(found[0], device), to_device(found[1], device)


@lru_cache(maxsize=256)
def _sampled(
    positions: int, inner: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return outer and inner index of the positions in the Gram matrix, and how many these are."""
    count = min(positions, GRAM_SAMPLES)
    if positions <= GRAM_SAMPLES:
        at = np.arange(positions)
    else:
        at = np.unique((np.arange(1, count + 1) * _STEP % 1 * positions).astype(np.int64))
    outer, within = np.divmod(at, inner)
    indices = [to_device(torch.from_numpy(each), device) for each in (outer, within)]
    return indices[0], indices[1], len(at)


def _add_gram(shaped: torch.Tensor, into: torch.Tensor) -> None:
    """Add unbiased estimates of tr(C), tr(C)^2 and tr(C^2) for the covariance C of the positions.

    All in units of the mean square of an element, so that passes of different size count alike.
    """
    positions = shaped.shape[0] * shaped.shape[2]
    outer, within, n = _sampled(positions, shaped.shape[2], shaped.device)
    if n < _FEWEST_SAMPLES:
        return
    wide = torch.float64 if shaped.dtype == torch.float64 else torch.float32
    sample = shaped[outer, :, within].to(wide)
    sample = sample / sample.square().mean().sqrt().clamp_min(torch.finfo(wide).tiny)
    centered = sample - sample.mean(0)
    gram = centered @ centered.T
    trace = gram.trace().double() / (n - 1)
    square = gram.double().square().sum() / (n - 1) ** 2
    square = ((n - 1) ** 2 / ((n - 2) * (n + 1))) * (square - trace**2 / (n - 1))
    into[0] += 1
    into[1] += trace
    into[2] += trace**2 - 2 * square / (n - 1)
    into[3] += square
    into[4] += sample.square().sum().double() / n


def bounds_of(function: Any) -> Bounds:
    """Return where the slope of a bounded activation falls below 5% of its largest.

    `function` is the module, or the name of a function.
    """
    name = function if isinstance(function, str) else type(function).__name__
    edges = {
        "sigmoid": (0.0127, 0.9873),
        "tanh": (-0.9747, 0.9747),
        "hardsigmoid": (0.0, 1.0),
        "relu6": (-math.inf, 6.0),
    }
    if name.lower() == "hardtanh":
        return float(function.min_val), float(function.max_val)
    return edges.get(name.lower(), UNBOUNDED)

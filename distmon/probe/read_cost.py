"""How long this rank's device takes to read all gradients once: measured at attach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from distmon.layout import Shard

MEASURED_BYTES: Final = 1 << 26
"""Weights that are read to measure the bandwidth: a few milliseconds on a CPU."""
MEASURED_TENSORS: Final = 512
"""Weights that are read at most: of many small ones a part shows what each costs."""
ASSUMED_BANDWIDTH: Final = 5e9
"""Bytes per second where it cannot be measured."""


def gradient_read_seconds(shards: Sequence[Shard]) -> float:
    """Estimate the time of one pass over the gradients of this rank. Waits for the device."""
    weights = [shard.weight().detach() for shard in shards if shard.requires_grad()]
    total = sum(weight.numel() * weight.element_size() for weight in weights)
    return total / _bandwidth(weights) if total else 0.0


def _bandwidth(weights: Sequence[torch.Tensor]) -> float:
    """Return the bytes per second of a norm over the first of these tensors."""
    some: list[torch.Tensor] = []
    nbytes = 0
    for weight in weights:
        if nbytes >= MEASURED_BYTES or len(some) == MEASURED_TENSORS:
            break
        if weight.numel():
            some.append(weight.reshape(-1)[: MEASURED_BYTES // weight.element_size()])
            nbytes += some[-1].numel() * weight.element_size()
    try:
        _norms([tensor[:1] for tensor in some[:1]])  # loads what the first call would load
        begin = time.perf_counter()
        _norms(some)
        return nbytes / max(time.perf_counter() - begin, 1e-9)
    except RuntimeError:  # a dtype that torch has no norm of
        return ASSUMED_BANDWIDTH


def _norms(tensors: Sequence[torch.Tensor]) -> None:
    found = torch._foreach_norm([*tensors])
    if found:
        found[-1].item()  # waits for a device

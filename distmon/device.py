"""Marks in a device's stream, and copies from and to a device, without waiting for it.

Everything goes through `torch.accelerator`, `torch.Event` and `torch.Stream`, on the device of the
tensor, which need not be the current one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on `device` is queued in streams."""
    return device.type not in ("cpu", "meta")


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured: then no event may be queried, nothing pinned."""
    if device.type != "cuda":  # ROCm calls itself cuda too
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one, where that exists."""
    if not is_accelerator(device) or device.index is None:
        return nullcontext()
    # torch.accelerator.device_index is the same, and newer than the oldest torch.
    module: Any = getattr(torch, device.type)
    context: AbstractContextManager[object] = module.device(device)
    return context


@cache
def has_float64(kind: str) -> bool:
    """Return whether devices of this type have float64; Apple's have not."""
    if kind in ("cpu", "meta"):
        return True
    try:
        return bool(torch.zeros(1, dtype=torch.float64, device=kind).dtype == torch.float64)
    except (TypeError, RuntimeError, NotImplementedError):
        return False


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no more."""
    return torch.float64 if has_float64(device.type) else torch.float32


class DeviceMark:
    """An event at the current end of the device's current stream."""

    def __init__(self, device: torch.device, timing: bool = False) -> None:
        self._event = torch.Event(device, enable_timing=timing)
        self._event.record(torch.accelerator.current_stream(device))

    def done(self) -> bool:
        """Return whether everything queued before the mark has run."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Return when everything queued before the mark has run."""
        self._event.synchronize()

    def seconds_since(self, earlier: DeviceMark) -> float | None:
        """Return the device's seconds between two marks; None before both have been reached."""
        if not (self.done() and earlier.done()):
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1000.0


def pinned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return host memory that a device copies to and from on its own."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` that is queued, not waited for; only pinned memory allows that."""
    if not is_accelerator(device):
        return host
    return host.pin_memory().to(device, non_blocking=True)

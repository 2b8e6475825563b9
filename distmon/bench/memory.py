"""Measure the memory of this process, now and at its peak.

On a CUDA device the allocator counts, to the byte. On a CPU it is resident memory; free memory that
malloc has kept is released first, because using it again would not be seen.
"""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch


class Meter(Protocol):
    """Reads bytes."""

    def now(self) -> int:
        """Return the bytes in use."""

    def begin(self) -> int:
        """Reset the peak and return the bytes in use."""

    def peak(self) -> int:
        """Return the maximum since `begin`."""

    def release(self) -> None:
        """Return unused memory to the system."""


class ResidentMemory:
    """This process on Linux. Raises an OSError where the peak cannot be reset."""

    def __init__(self) -> None:
        self.begin()

    def now(self) -> int:
        return _status("VmRSS")

    def begin(self) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present value
        return self.now()

    def peak(self) -> int:
        return _status("VmHWM")

    def release(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):  # not every libc has it
            ctypes.CDLL(None).malloc_trim(0)


class DeviceMemory:
    """torch's allocator on a CUDA device."""

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return self.now()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        gc.collect()


def meter_for(device: torch.device) -> Meter | None:
    """Return what measures the memory of training on `device`; None where nothing can."""
    if device.type == "cuda":
        return DeviceMemory()
    with suppress(OSError):
        return ResidentMemory()
    return None


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024

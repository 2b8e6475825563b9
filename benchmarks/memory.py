"""How much memory this process has, and had at most.

On a CUDA device the allocator tells, to the byte. On a CPU it is what the system counts as
resident; free memory that malloc has kept is given back first, because nobody would see it being
used again.
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
        """In use."""

    def begin(self) -> int:
        """In use; from here on the peak is watched."""

    def peak(self) -> int:
        """Most that was in use since `begin`."""

    def tidy(self) -> None:
        """Give back what is not used."""


class ResidentMemory:
    """This process on Linux. Raises an OSError where the peak cannot be reset."""

    def __init__(self) -> None:
        self.begin()

    def now(self) -> int:
        return _status("VmRSS")

    def begin(self) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what there is now
        return self.now()

    def peak(self) -> int:
        return _status("VmHWM")

    def tidy(self) -> None:
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

    def tidy(self) -> None:
        gc.collect()


def meter_for(device: torch.device) -> Meter | None:
    """What counts the memory that training uses; None where nobody can."""
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

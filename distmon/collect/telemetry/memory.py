"""Memory of this process: torch's caching allocator on the device, and resident host memory."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

STATM = Path("/proc/self/statm")
PERIOD_S: Final = 0.02
"""A reading takes longer than most of what is sent: where each step of some milliseconds is
observed, not every time. Longer, and the growth of a leak in fast steps would be a staircase."""
_LONGEST: Final = 160
"""Bytes that are read of it: seven numbers."""


@dataclass(frozen=True)
class MemoryReading:
    """Device fields are NaN without an accelerator, host fields outside Linux."""

    allocated_bytes: float = math.nan
    """Memory allocated by tensors now."""
    reserved_bytes: float = math.nan
    """Memory reserved by the caching allocator."""
    peak_bytes: float = math.nan
    """Peak of the allocated memory; distmon never resets it, the user may."""
    fragmentation: float = math.nan
    """Share of the reserved memory in inactive split blocks, which is hard to reuse."""
    retries: float = math.nan
    """Number of times that the allocator freed its cache to find memory; each one stalls."""
    ooms: float = math.nan
    """Number of out-of-memory errors."""
    device_total_bytes: float = math.nan
    """Total memory of the device."""
    rss_bytes: float = math.nan
    """Resident memory of the process on the host."""


def read_memory(
    device: torch.device,
    stats: Callable[[torch.device], Mapping[str, Any]] = torch.cuda.memory_stats_as_nested_dict,
    total_bytes: Callable[[torch.device], float] | None = None,
    rss: float = math.nan,
) -> MemoryReading:
    """Read the allocator's counters, without querying the device; `rss`: memory on the host."""
    counters = stats(device) if device.type == "cuda" else {}
    if not counters:  # no accelerator, or nothing allocated on it yet
        return MemoryReading(rss_bytes=rss)
    allocated, reserved, split = (
        counters[name]["all"]
        for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    )
    held = reserved["current"]
    return MemoryReading(
        allocated_bytes=allocated["current"],
        reserved_bytes=held,
        peak_bytes=allocated["peak"],
        fragmentation=split["current"] / held if held else 0.0,
        retries=counters["num_alloc_retries"],
        ooms=counters["num_ooms"],
        device_total_bytes=(total_bytes or _total_bytes)(device),
        rss_bytes=rss,
    )


class ResidentMemory:
    """The resident memory of this process. The file stays open: opening takes most of a reading."""

    def __init__(self, statm: Path = STATM, period_s: float = PERIOD_S) -> None:
        """`period_s`: shortest time between two readings."""
        self._statm = statm
        self._period_s = period_s
        self._file = -1
        self._bytes = math.nan
        self._read_at = -math.inf

    def bytes(self) -> float:
        """Return its size in bytes when it was last read; NaN where /proc does not have it."""
        now = time.monotonic()
        if now - self._read_at >= self._period_s:
            self._bytes, self._read_at = self._read(), now
        return self._bytes

    def _read(self) -> float:
        try:
            if self._file < 0:
                self._file = os.open(self._statm, os.O_RDONLY)
            return float(int(os.pread(self._file, _LONGEST, 0).split()[1]) * mmap.PAGESIZE)
        except (OSError, ValueError, IndexError):
            return math.nan

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _total_bytes(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)

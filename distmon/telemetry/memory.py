"""Memory as this process sees it: torch's allocator on the device, and the process on the host."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class MemoryReading:
    """NaN for the device's fields without an accelerator, and for the host's outside Linux."""

    allocated_bytes: float = math.nan
    """In tensors now."""
    reserved_bytes: float = math.nan
    """Held by the allocator, in tensors or not."""
    peak_bytes: float = math.nan
    """Most ever in tensors; the peak is the user's to reset and is never reset here."""
    fragmentation: float = math.nan
    """Share of what is reserved that is free but split off a larger block: of little use."""
    retries: float = math.nan
    """How often the allocator had to give back its cache to find room: each one stalls."""
    ooms: float = math.nan
    """How often it found none."""
    device_total_bytes: float = math.nan
    """Memory of the device."""
    rss_bytes: float = math.nan
    """Memory of the process on the host."""


def read_memory(
    device: torch.device,
    stats: Callable[[torch.device], Mapping[str, Any]] = torch.cuda.memory_stats_as_nested_dict,
    total_bytes: Callable[[torch.device], float] | None = None,
    statm: Path = STATM,
) -> MemoryReading:
    """Look at the allocator's counters and the process. Nothing is asked of the device itself."""
    rss = resident_bytes(statm)
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


def resident_bytes(statm: Path = STATM) -> float:
    """Memory of this process on the host, NaN where the system does not tell it in /proc."""
    try:
        with open(statm, "rb", buffering=0) as file:  # a third of what read_text() costs
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return math.nan
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _total_bytes(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)

"""One reading of the hardware, and the summary of several readings.

A field is NaN where the device, the driver or the permissions do not provide it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


def _field(summary: str, unit: str, meaning: str) -> float:
    """Declare a number of the reading; `summary` combines several: mean, max or last."""
    metadata = {"summary": summary, "unit": unit, "help": meaning}
    return dataclasses.field(default=math.nan, metadata=metadata)


@dataclass(frozen=True)
class HardwareReading:
    """One device at one time, or over several samples (`samples` > 1). Counters never decrease."""

    memory_used_bytes: float = _field("max", "B", "device memory in use by all processes")
    memory_total_bytes: float = _field("last", "B", "device memory")
    gpu_utilization: float = _field("mean", "", "share of time with a kernel running, 0 to 1")
    memory_utilization: float = _field("mean", "", "share of time with memory traffic, 0 to 1")
    power_watts: float = _field("mean", "W", "power drawn by the board")
    power_limit_watts: float = _field("last", "W", "power limit in force")
    temperature_c: float = _field("max", "C", "temperature of the chip")
    memory_temperature_c: float = _field("max", "C", "temperature of the memory")
    sm_clock_mhz: float = _field("mean", "MHz", "clock of the compute units")
    memory_clock_mhz: float = _field("mean", "MHz", "clock of the memory")
    ecc_corrected: float = _field("last", "", "corrected memory errors since the driver started")
    ecc_uncorrected: float = _field("last", "", "uncorrected memory errors: data was lost")
    pcie_replay: float = _field("last", "", "PCIe packets sent again since the driver started")
    pcie_tx_bytes_per_second: float = _field("mean", "B/s", "device to host")
    pcie_rx_bytes_per_second: float = _field("mean", "B/s", "host to device")
    nvlink_errors: float = _field("last", "", "NVLink errors of all links since the driver started")
    processes: float = _field("last", "", "compute processes on the device")
    throttle_reasons: int | None = None
    """Bits of `throttle.REASONS`, or-ed over all samples; None when they cannot be read."""
    problem: str | None = None
    """One sentence when the whole device could not be read."""
    samples: int = 0
    """Number of times that the device was read."""


NUMBERS = tuple(f for f in dataclasses.fields(HardwareReading) if "summary" in f.metadata)
"""The fields that are plain numbers, with `summary`, `unit` and `help` in their metadata."""


class HardwareReader(Protocol):
    """Reads one device. Its methods run in the sampler's thread and may block."""

    @property
    def device(self) -> str:
        """Name and UUID, for messages."""

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field."""

    def read(self) -> HardwareReading:
        """Read the device once. Never raises for errors of the driver."""

    def close(self) -> None:
        """Release the library."""


class OpenResult(NamedTuple):
    """A reader, or one sentence why there is none."""

    reader: HardwareReader | None
    reason: str | None


OpenReader = Callable[[], OpenResult]


class Summary:
    """Combines readings: means, maxima, newest values, all throttle reasons."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._largest: dict[str, float] = {}
        self._newest: dict[str, float] = {}
        self._throttle: int | None = None
        self._samples = 0

    def add(self, reading: HardwareReading) -> None:
        """Add one reading; NaN fields are ignored."""
        self._samples += 1
        if reading.throttle_reasons is not None:
            self._throttle = (self._throttle or 0) | reading.throttle_reasons
        for field in NUMBERS:
            name = field.name
            value = getattr(reading, name)
            if math.isnan(value):
                continue
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
            self._largest[name] = max(self._largest.get(name, value), value)
            self._newest[name] = value

    def result(self) -> HardwareReading:
        """Return all added readings as one."""
        numbers = {
            "mean": {name: self._sums[name] / self._counts[name] for name in self._sums},
            "max": self._largest,
            "last": self._newest,
        }
        values: dict[str, Any] = {
            f.name: numbers[f.metadata["summary"]].get(f.name, math.nan) for f in NUMBERS
        }
        return HardwareReading(**values, throttle_reasons=self._throttle, samples=self._samples)

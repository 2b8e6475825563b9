"""What one look at the hardware gives, and how several looks become one.

A field that the device, the driver or the permissions do not give is NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


def _field(summary: str, unit: str, meaning: str) -> float:
    """A number of the reading; `summary` is how several become one: mean, max or last."""
    metadata = {"summary": summary, "unit": unit, "help": meaning}
    return dataclasses.field(default=math.nan, metadata=metadata)


@dataclass(frozen=True)
class HardwareReading:
    """One device at one moment, or over a while (`samples` > 1). Counters only ever grow."""

    memory_used_bytes: float = _field("max", "B", "device memory in use by anyone")
    memory_total_bytes: float = _field("last", "B", "device memory")
    gpu_utilisation: float = _field("mean", "", "share of time with a kernel running, 0 to 1")
    memory_utilisation: float = _field("mean", "", "share of time with memory traffic, 0 to 1")
    power_watts: float = _field("mean", "W", "power drawn by the board")
    power_limit_watts: float = _field("last", "W", "power limit in force")
    temperature_c: float = _field("max", "C", "temperature of the chip")
    memory_temperature_c: float = _field("max", "C", "temperature of the memory")
    sm_clock_mhz: float = _field("mean", "MHz", "clock of the compute units")
    memory_clock_mhz: float = _field("mean", "MHz", "clock of the memory")
    ecc_corrected: float = _field("last", "", "corrected memory errors since the driver started")
    ecc_uncorrected: float = _field("last", "", "uncorrected ones: data was lost")
    pcie_replay: float = _field("last", "", "PCIe packets sent again since the driver started")
    pcie_tx_bytes_per_second: float = _field("mean", "B/s", "device to host")
    pcie_rx_bytes_per_second: float = _field("mean", "B/s", "host to device")
    nvlink_errors: float = _field("last", "", "NVLink errors of all links since the driver started")
    processes: float = _field("last", "", "compute processes on the device")
    throttle_reasons: int | None = None
    """Bits of `throttle.REASONS`, of all samples together; None when they cannot be read."""
    problem: str | None = None
    """One sentence when the device as a whole could not be read."""
    samples: int = 0
    """How many times the device was read for this."""


NUMBERS = tuple(f for f in dataclasses.fields(HardwareReading) if "summary" in f.metadata)
"""The fields that are plain numbers, with `summary`, `unit` and `help` in their metadata."""


class HardwareReader(Protocol):
    """Reads one device. Its methods run in the sampler's thread and may take their time."""

    @property
    def device(self) -> str:
        """Name and UUID, for people."""

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field."""

    def read(self) -> HardwareReading:
        """Look once. Never raises for what the driver answers."""

    def close(self) -> None:
        """Let the library go."""


class Opened(NamedTuple):
    """A reader, or one sentence that says why there is none."""

    reader: HardwareReader | None
    reason: str | None


OpenReader = Callable[[], Opened]


class Summary:
    """Takes readings in, gives one back: means, maxima, newest values, all throttle reasons."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._largest: dict[str, float] = {}
        self._newest: dict[str, float] = {}
        self._throttle: int | None = None
        self._samples = 0

    def add(self, reading: HardwareReading) -> None:
        """Take one reading in; what is NaN in it does not count."""
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
        """What was taken in, as one reading."""
        numbers = {
            "mean": {name: self._sums[name] / self._counts[name] for name in self._sums},
            "max": self._largest,
            "last": self._newest,
        }
        values: dict[str, Any] = {
            f.name: numbers[f.metadata["summary"]].get(f.name, math.nan) for f in NUMBERS
        }
        return HardwareReading(**values, throttle_reasons=self._throttle, samples=self._samples)

"""This rank's row: everything that it tells about its own speed, memory and device."""

from __future__ import annotations

import math
from typing import Final

import torch

from distmon.telemetry.hardware import HardwareReading, HardwareSampler
from distmon.telemetry.memory import read_memory
from distmon.telemetry.phases import PhaseClock, marks_for
from distmon.telemetry.step_clock import StepClock

FROM_DEVICE: Final = (
    "memory_used_bytes",
    "memory_total_bytes",
    "gpu_utilisation",
    "power_watts",
    "power_limit_watts",
    "temperature_c",
    "sm_clock_mhz",
    "ecc_uncorrected",
    "pcie_replay",
    "nvlink_errors",
)
"""What is told of a reading of the hardware, besides its throttle reasons."""
FROM_ALLOCATOR: Final = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_bytes",
    "fragmentation",
    "retries",
    "ooms",
    "rss_bytes",
)
"""What is told of the memory of this process."""


class RankTelemetry:
    """Gathers the row between observations. Nothing in it waits for the device or its driver."""

    def __init__(
        self,
        device: torch.device,
        hardware: HardwareSampler | None,
    ) -> None:
        self._device = device
        self._hardware = hardware
        self._nothing = dict.fromkeys((*FROM_DEVICE, "throttle_reasons"), math.nan)
        self.steps = StepClock()
        self.phases = PhaseClock(marks_for(device))

    def take(self) -> dict[str, float]:
        """The row since the last call; what is not known is absent or NaN."""
        memory = read_memory(self._device)
        return {
            **self.steps.take(),
            **self.phases.take(),
            **{name: getattr(memory, name) for name in FROM_ALLOCATOR},
            **(self._nothing if self._hardware is None else _numbers(self._hardware.take())),
        }

    def close(self) -> None:
        """End the thread that asks the driver."""
        if self._hardware is not None:
            self._hardware.close()


def _numbers(reading: HardwareReading) -> dict[str, float]:
    reasons = reading.throttle_reasons
    return {
        **{name: getattr(reading, name) for name in FROM_DEVICE},
        "throttle_reasons": math.nan if reasons is None else float(reasons),
    }

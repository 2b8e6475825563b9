"""This rank's row: everything that it tells about its own speed, memory and device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._hardware = hardware
        self._steps = StepClock(now)
        self.phases = PhaseClock(marks_for(device))

    def step_done(self, tokens: float, samples: float) -> None:
        """A step has ended; what it took from the data, all micro-batches together."""
        self._steps.tick(tokens, samples)

    def take(self) -> dict[str, float]:
        """The row since the last call; what is not known is absent or NaN."""
        row = self._steps.take()
        row |= self.phases.take()
        memory = read_memory(self._device)
        row |= {name: getattr(memory, name) for name in FROM_ALLOCATOR}
        reading = HardwareReading() if self._hardware is None else self._hardware.take()
        row |= {name: getattr(reading, name) for name in FROM_DEVICE}
        reasons = reading.throttle_reasons
        return row | {"throttle_reasons": math.nan if reasons is None else float(reasons)}

    def close(self) -> None:
        """End the thread that asks the driver."""
        if self._hardware is not None:
            self._hardware.close()

"""Rank telemetry: what this rank measures about its own speed, memory and device."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from distmon.collect.losses import Number, host_value
from distmon.collect.signals import StepSignals
from distmon.collect.telemetry.hardware import HardwareReading, HardwareSampler
from distmon.collect.telemetry.memory import ResidentMemory, read_memory
from distmon.collect.telemetry.phases import PhaseClock, marks_for
from distmon.collect.telemetry.step_clock import StepClock
from distmon.collect.telemetry.utilization import Utilization

FROM_DEVICE: Final = (
    "memory_used_bytes",
    "memory_total_bytes",
    "gpu_utilization",
    "power_watts",
    "power_limit_watts",
    "temperature_c",
    "sm_clock_mhz",
    "ecc_uncorrected",
    "pcie_replay",
    "nvlink_errors",
)
"""Fields of a hardware reading that are sent, in addition to its throttle reasons."""
FROM_ALLOCATOR: Final = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_bytes",
    "fragmentation",
    "retries",
    "ooms",
    "rss_bytes",
)
"""Fields of a memory reading that are sent."""


class RankTelemetry:
    """Collects telemetry between observations. It never waits for the device or its driver."""

    def __init__(
        self,
        device: torch.device,
        hardware: HardwareSampler | None,
        utilization: Utilization | None = None,
        signals: StepSignals | None = None,
    ) -> None:
        self.utilization = utilization or Utilization()
        self._device = device
        self._hardware = hardware
        self._no_hardware = dict.fromkeys((*FROM_DEVICE, "throttle_reasons"), math.nan)
        self._no_allocator = dict.fromkeys(FROM_ALLOCATOR, math.nan)
        self.signals = signals
        self._resident = ResidentMemory()
        self.steps = StepClock()
        self.phases = PhaseClock(marks_for(device))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is measured in the coming step but its time."""
        return not self.utilization.wanted and (self.signals is None or not self.signals.armed)

    @property
    def hook_seconds(self) -> float:
        """Time that the hooks on models and parameters took so far."""
        signals = 0.0 if self.signals is None else self.signals.hook_seconds
        return self.phases.hook_seconds + signals

    def optimizer_begins(self) -> None:
        """Begin the phase `optimizer`; called before an optimizer steps."""
        self.phases.enter("optimizer")
        if self.signals is not None:
            self.signals.optimizer_begins()
        if self.utilization.wanted:
            self.utilization.end_backward()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes are the monitor's own."""
        return nullcontext() if self.signals is None else self.signals.paused()

    def optimizer_ends(self) -> None:
        """End the phase `optimizer`; called after an optimizer has stepped."""
        self.phases.enter("other")

    def step_ends(self, now: float, tokens: Number | None, samples: Number | None) -> None:
        """Count a completed step; `tokens` and `samples` are those of this rank."""
        self.steps.tick(now, tokens, samples)
        if self.utilization.wanted:
            self.utilization.end_step(0.0 if tokens is None else host_value(tokens))

    def step_begins(self, coming: int, next_observation: int, ended: bool = False) -> None:
        """Begin the step `coming`; called after the monitor's own work between steps.

        `ended`: the lane has ended the phases of the step before.
        """
        if self.utilization.wanted:
            self.utilization.begin_step()
        begin = self.phases.begin_step if ended else self.phases.step_done
        begin(coming, next_observation)
        if self.signals is not None:
            self.signals.step_begins(coming, next_observation)

    def take(self) -> dict[str, Number]:
        """Return the telemetry since the last call; unknown values are missing or NaN."""
        return {
            **self.steps.take(),
            **self.phases.take(),
            **self.utilization.fields(),
            **self._memory(),
            **(self._no_hardware if self._hardware is None else _numbers(self._hardware.take())),
            **({} if self.signals is None else self.signals.take()),
        }

    def _memory(self) -> dict[str, float]:
        rss = self._resident.bytes()
        if self._device.type == "cpu":
            return {**self._no_allocator, "rss_bytes": rss}
        memory = read_memory(self._device, rss=rss)
        return {name: getattr(memory, name) for name in FROM_ALLOCATOR}

    def close(self) -> None:
        """End the hardware sampler's thread, the phases and the counting of FLOPs; close files."""
        self.phases.stop()
        self._resident.close()
        self.utilization.end_backward()
        if self.signals is not None:
            self.signals.close()
        if self._hardware is not None:
            self._hardware.close()


def _numbers(reading: HardwareReading) -> dict[str, float]:
    reasons = reading.throttle_reasons
    return {
        **{name: getattr(reading, name) for name in FROM_DEVICE},
        "throttle_reasons": math.nan if reasons is None else float(reasons),
    }

"""MFU: the model's FLOPs per second over what the devices could do, with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from distmon.telemetry.mfu.model_flops import ModelFlops
from distmon.telemetry.mfu.peaks import Peak


@dataclass(frozen=True)
class Provenance:
    """What an MFU is made of. Two numbers can be compared when these are equal."""

    flops: ModelFlops
    peak: Peak

    def describe(self) -> str:
        """One line, as in `6N + causal attention by formula (...), peak 312 TFLOP/s (...)`."""
        return (
            f"{self.flops.description} ({self.flops.value:.4g} FLOPs per {self.flops.per}), "
            f"peak {self.peak.describe()}"
        )


@dataclass(frozen=True)
class MfuReading:
    """One MFU, or one sentence why it is none."""

    value: float | None
    """Between 0 and 1."""
    problem: str | None
    provenance: Provenance


class Mfu:
    """Turns throughput into MFU. How a step was cut into micro-batches makes no difference."""

    def __init__(self, flops: ModelFlops, peak: Peak) -> None:
        self.provenance = Provenance(flops, peak)

    def value(self, per_second: float, devices: int) -> MfuReading:
        """`per_second`: tokens (or steps, if the FLOPs are per step) of all devices together."""
        flops, peak = self.provenance.flops, self.provenance.peak
        unit = f"{flops.per}s"
        if not (isfinite(per_second) and per_second > 0 and devices > 0):
            return self._without(f"no MFU: {per_second:g} {unit}/s on {devices} devices")
        value = flops.value * per_second / (devices * peak.flops)
        if value > 1:
            return self._without(
                f"MFU of {value:.0%} is impossible: check the peak of {peak.describe()}, the "
                f"{flops.value:.4g} FLOPs per {flops.per} ({flops.description}), and the "
                f"{per_second:.4g} {unit}/s on {devices} devices"
            )
        return MfuReading(value, None, self.provenance)

    def _without(self, problem: str) -> MfuReading:
        return MfuReading(None, problem, self.provenance)

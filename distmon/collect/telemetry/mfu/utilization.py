"""MFU: the model's FLOP/s divided by the peak FLOP/s of the devices, with its provenance."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from distmon.collect.telemetry.mfu.model_flops import ModelFlops
from distmon.collect.telemetry.mfu.peaks import Peak


@dataclass(frozen=True)
class Provenance:
    """The inputs of an MFU. Two MFU values are comparable when these are equal."""

    flops: ModelFlops
    peak: Peak

    def describe(self) -> str:
        """Return one line: `6N + causal attention by formula (...), peak 312 TFLOP/s (...)`."""
        return (
            f"{self.flops.description} ({self.flops.value:.4g} FLOPs per {self.flops.per}), "
            f"peak {self.peak.describe()}"
        )


class Mfu:
    """Converts throughput into MFU, independently of the number of micro-batches."""

    def __init__(self, flops: ModelFlops, peak: Peak) -> None:
        self.provenance = Provenance(flops, peak)

    def value(self, per_second: float, devices: int) -> float | None:
        """Return the MFU; above 1 when an input is wrong, None without a throughput.

        `per_second`: tokens (or steps, if the FLOPs are per step) of all devices together.
        """
        if not (isfinite(per_second) and per_second > 0 and devices > 0):
            return None
        return self.provenance.flops.value * per_second / (devices * self.provenance.peak.flops)

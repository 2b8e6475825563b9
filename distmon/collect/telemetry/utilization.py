"""The MFU of a run: set up once, and added to every record."""

from __future__ import annotations

import logging

from distmon.collect.telemetry.mfu.counting import UsefulFlops
from distmon.collect.telemetry.mfu.peaks import Peak
from distmon.collect.telemetry.mfu.utilization import Mfu
from distmon.errors import DistmonError

log = logging.getLogger("distmon")


class Utilization:
    """Computes MFU once the model's FLOPs and the device's peak are known."""

    def __init__(self) -> None:
        self.mfu: Mfu | None = None
        self._requested: tuple[Peak, bool] | None = None
        self._counter: UsefulFlops | None = None
        self._counting = False

    @property
    def source(self) -> str:
        """FLOPs and peak with their sources; empty while MFU is unknown."""
        return "" if self.mfu is None else self.mfu.provenance.describe()

    def count_once(self, peak: Peak, causal: bool) -> None:
        """Request that the FLOPs of the next training step are counted."""
        self._requested = (peak, causal)

    @property
    def wanted(self) -> bool:
        """Whether a step is still to be counted; otherwise the three methods below do nothing."""
        return self._requested is not None

    def begin_step(self) -> None:
        """Begin to count if requested; called after the previous step."""
        if self._requested is None or self._counter is not None:
            return
        try:
            self._counter = UsefulFlops()
            self._counter.__enter__()
            self._counting = True
        except Exception as error:  # in the user's training loop
            self._give_up(error)

    def end_backward(self) -> None:
        """End the counting; called before the optimizer step, or at close."""
        if not self._counting or self._counter is None:
            return
        self._counting = False
        try:
            self._counter.__exit__(None, None, None)
        except Exception as error:
            self._give_up(error)

    def end_step(self, tokens: float) -> None:
        """Compute MFU from the counted step; `tokens` are those of this rank in that step."""
        self.end_backward()  # for a skipped step
        if self._counter is None or self._requested is None:
            return
        peak, causal = self._requested
        self._requested = None
        try:
            self.mfu = Mfu(self._counter.per_token(tokens, causal), peak)
            log.info("distmon: MFU from %s", self.mfu.provenance.describe())
        except DistmonError as error:
            log.warning("distmon: %s", error)

    def _give_up(self, error: Exception) -> None:
        self._requested = None
        log.warning("distmon: no MFU: counting FLOPs failed: %s: %s", type(error).__name__, error)

    def fields(self) -> dict[str, float]:
        """Return what this rank sends about it: FLOPs and peak, 0 while they are unknown."""
        if self.mfu is None:
            return {"flops_per_token": 0.0, "peak_flops": 0.0}
        known = self.mfu.provenance
        return {"flops_per_token": known.flops.value, "peak_flops": known.peak.flops}

"""The MFU of a run: set up once, and told with every record."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from distmon.errors import DistmonError
from distmon.telemetry.mfu.counting import UsefulFlops
from distmon.telemetry.mfu.peaks import Peak
from distmon.telemetry.mfu.utilization import Mfu

log = logging.getLogger("distmon")


class Utilization:
    """Empty until it is known what the model needs and what the device can do."""

    def __init__(self) -> None:
        self.mfu: Mfu | None = None
        self._counter: UsefulFlops | None = None
        self._counting: tuple[Peak, bool] | None = None

    def count_once(self, peak: Peak, causal: bool) -> None:
        """Count the FLOPs of one training step, between `begin_step` and `end_step`."""
        self._counting = (peak, causal)

    def begin_step(self) -> None:
        """Just after a step: the next one is counted, if that was asked for."""
        if self._counting is not None and self._counter is None:
            self._counter = UsefulFlops()
            self._counter.__enter__()

    def end_backward(self) -> None:
        """Just before the optimizer: what was to be counted is over."""
        if self._counter is not None and self._counting is not None:
            self._counter.__exit__(None, None, None)

    def end_step(self, tokens: float) -> None:
        """`tokens` are this rank's own in the step that was counted."""
        if self._counter is None or self._counting is None:
            return
        counter, (peak, causal) = self._counter, self._counting
        self._counting = None
        try:
            self.mfu = Mfu(counter.per_token(tokens, causal), peak)
            log.info("MFU: %s", self.mfu.provenance.describe())
        except DistmonError as error:
            log.warning("%s", error)

    def metrics(self, known: Mapping[str, float], devices: int) -> dict[str, float]:
        """`performance/mfu`, or the impossible number under a name of its own."""
        rate = known.get("performance/tokens_per_second")
        if self.mfu is None or rate is None:
            return {}
        flops, peak = self.mfu.provenance.flops, self.mfu.provenance.peak
        reading = self.mfu.value(rate, devices)
        if reading.value is not None:
            return {"performance/mfu": reading.value}
        raw = flops.value * rate / (devices * peak.flops)
        return {"performance/mfu_over_limit": raw} if raw > 1 else {}

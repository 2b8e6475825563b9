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
        self._asked: tuple[Peak, bool] | None = None
        self._counter: UsefulFlops | None = None
        self._counting = False

    @property
    def source(self) -> str:
        """The FLOPs and the peak, and where both are from; empty while MFU is not known."""
        return "" if self.mfu is None else self.mfu.provenance.describe()

    def count_once(self, peak: Peak, causal: bool) -> None:
        """Count the FLOPs of one training step, between `begin_step` and `end_step`."""
        self._asked = (peak, causal)

    @property
    def wanted(self) -> bool:
        """Whether a step is still to be counted: otherwise the three below do nothing."""
        return self._asked is not None

    def begin_step(self) -> None:
        """Just after a step: the next one is counted, if that was asked for."""
        if self._asked is None or self._counter is not None:
            return
        try:
            self._counter = UsefulFlops()
            self._counter.__enter__()
            self._counting = True
        except Exception as error:  # in the user's training loop
            self._give_up(error)

    def end_backward(self) -> None:
        """Just before an optimizer, or at the end: what was to be counted is over."""
        if not self._counting or self._counter is None:
            return
        self._counting = False
        try:
            self._counter.__exit__(None, None, None)
        except Exception as error:
            self._give_up(error)

    def end_step(self, tokens: float) -> None:
        """`tokens` are this rank's own in the step that was counted."""
        self.end_backward()  # a step that no optimizer took
        if self._counter is None or self._asked is None:
            return
        peak, causal = self._asked
        self._asked = None
        try:
            self.mfu = Mfu(self._counter.per_token(tokens, causal), peak)
            log.info("MFU: %s", self.mfu.provenance.describe())
        except DistmonError as error:
            log.warning("%s", error)

    def _give_up(self, error: Exception) -> None:
        self._asked = None
        log.warning("no MFU: counting FLOPs failed: %s: %s", type(error).__name__, error)

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

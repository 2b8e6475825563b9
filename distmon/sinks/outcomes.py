"""What became of the items of one sink: counts, gaps, and one warning for each kind of failure."""

from __future__ import annotations

import logging

from distmon.record.record import Record
from distmon.redaction import Redactor
from distmon.rules.alert import Alert
from distmon.sinks.gaps import GapLog

logger = logging.getLogger("distmon")
Item = Record | Alert


class Outcomes:
    """Counts are changed by its lane only, which holds its lock meanwhile."""

    def __init__(self, sink: str, gaps: GapLog | None) -> None:
        self.sink = sink
        self.written = self.failed = self.dropped = 0
        self._gaps = gaps
        self._warned = False
        self._waited = False

    def stats(self) -> dict[str, int]:
        """Return the number of items that were written, failed and dropped."""
        return {"written": self.written, "failed": self.failed, "dropped": self.dropped}

    def lose(self, item: Item, reason: str) -> None:
        """Note in the run folder that an item is lost."""
        if self._gaps is not None:
            self._gaps.lost(self.sink, item, reason)

    def recover(self) -> None:
        """Follow a success: after a failure, say so and write down what was lost."""
        if self._waited:
            self._waited = False
            logger.warning('distmon: the sink "%s" works again', self.sink)
            if self._gaps is not None:
                self._gaps.write()

    def warn(self, error: BaseException, *, opening: bool, waits: bool, unusable: bool) -> None:
        """Log a failure: each kind once, and the next one after the sink has worked again."""
        if waits and not self._waited:
            self._waited = True
            self._warned = False
        if unusable:
            outcome = "could not be opened and is disabled"
        elif opening:
            outcome = "could not be opened and is tried again"
        elif waits:
            outcome = "cannot write; what it gets waits until it can"
        else:
            outcome = "failed on one item and stays in use"
        self.warn_once(error, outcome)

    def warn_once(self, error: BaseException, outcome: str) -> None:
        """Log a failure, unless one was logged since the sink has worked last."""
        if self._warned:
            return
        self._warned = True
        text = Redactor().text(" ".join(str(error).split())) or "no message"
        logger.warning(
            'distmon: the sink "%s" %s: %s: %s', self.sink, outcome, type(error).__name__, text
        )

    def summarize(self, timeout: float | None) -> None:
        """Log what is missing; with `timeout`, the sink was abandoned after so many seconds."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.stats().items())
        if timeout is not None:
            logger.warning(
                'distmon: the sink "%s" did not finish within %g s and was abandoned: %s',
                self.sink,
                timeout,
                counts,
            )
        elif self.failed or self.dropped:
            logger.warning('distmon: the sink "%s" is incomplete: %s', self.sink, counts)

"""A hint for training loops that never call `Monitor.step`."""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("distmon")

HINT_AFTER: Final = 200
"""Optimizer steps without a call of `Monitor.step` after which it is mentioned."""


class StepHint:
    """Counts the steps of the first optimizer since `Monitor.step` was called; warns once."""

    def __init__(self, rank: int, after: int = HINT_AFTER) -> None:
        self._after = after
        self._wanted = rank == 0
        self._first: object = None
        self._count = 0

    def optimizer_stepped(self, optimizer: object) -> None:
        """Count a step; other optimizers of the same training step are not counted."""
        if self._count == 0:
            self._first = optimizer
        if optimizer is self._first:
            self._count += 1
            if self._count == self._after and self._wanted:
                self._wanted = False
                log.warning(
                    "distmon: the optimizer has stepped %d times without a call of monitor.step(); "
                    "call it once after each optimizer step, or nothing is recorded",
                    self._count,
                )

    def step_called(self) -> None:
        """Start over."""
        self._count = 0

"""Exponential moving average of the training loss."""

from __future__ import annotations

import math


class LossEma:
    """`ema = decay * ema + (1 - decay) * loss`, started from the first loss.

    The weight on the new loss is the small one: decay 0.99 remembers about 100 steps. A loss that
    is not finite is ignored, since the average would never recover.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value: float | None = None

    def update(self, loss: float) -> float | None:
        """Add one loss and return the average."""
        if math.isfinite(loss):
            old = self.value
            self.value = loss if old is None else self.decay * old + (1 - self.decay) * loss
        return self.value

"""How much of every tensor is read: whole where that fits the budget, else by a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SampleSize = int | Literal["auto", "sampled", "exact"]
DEFAULT_SAMPLE: Final = 1024
"""Elements of each weight and its update."""
STEP_PASSES: Final = 40
"""A training step takes at least as long as reading all gradients so many times: an AdamW step
alone moves 7 times as much, and the forward and backward passes compute besides."""
SHORT_PASS_S: Final = 1e-3
"""A pass of at most this is read whole whatever the budget: an observation takes as long anyway."""


@dataclass(frozen=True)
class Reading:
    """What is read at an observation; the same on every rank.

    Updates are always sampled: a whole one would need a clone of the model.
    """

    sample_size: int = DEFAULT_SAMPLE
    """Elements of each weight and its update."""
    whole_gradients: bool = False
    """Norm, moments and extremes of gradients are over every element; percentiles are sampled."""
    whole_weights: bool = False
    """Weights are read whole as well, and percentiles of gradients are over every element."""
    seconds: float = 0.0
    """Estimated time of a pass over all gradients on the slowest rank."""

    @property
    def text(self) -> str:
        """What is read, in a few words."""
        if self.whole_weights:
            return "weights and gradients in full, updates sampled"
        if self.whole_gradients:
            return "gradients in full, weights and updates sampled"
        return "gradients, weights and updates sampled"


def choose_reading(
    sample_size: SampleSize, budget: float | None, interval: int, seconds: float
) -> Reading:
    """Return what is read under this setting.

    `seconds` is what reading all gradients takes on the slowest rank. Under `auto` they are read
    whole where that takes at most a quarter of the budget, or a millisecond. The length of a step
    is not known at attach, so it is taken as short as it can be.
    """
    if sample_size == "exact":
        return Reading(whole_gradients=True, whole_weights=True, seconds=seconds)
    if isinstance(sample_size, int):
        return Reading(sample_size, seconds=seconds)
    step = STEP_PASSES * seconds
    fits = budget is None or seconds <= max(SHORT_PASS_S, budget / 4 * interval * step)
    return Reading(whole_gradients=sample_size == "auto" and fits, seconds=seconds)

"""How far validation losses differ by chance: many trainers evaluate on a single batch."""

from __future__ import annotations

import math
import statistics
from typing import Final

import numpy as np

from distmon.record.record import Evaluation, Record
from distmon.rules.base import Memory

KEPT: Final = 9
"""Earlier validation losses whose spread is the noise."""
FEWEST: Final = 5
"""Validation losses before their spread is known."""
DEVIATIONS: Final = 3.0
"""Standard deviations of a difference that chance makes: a run has many evaluations."""
BATCHES: Final = 32
"""Training losses that show how far one batch can be from another."""
_UNDONE: Final = 0.567
"""Mean undone move of independent normal numbers, in standard deviations."""
_LARGEST: Final = 3.3
"""Largest difference between neighbors of 32 normal numbers, in standard deviations."""


def chance_difference(record: Record, evaluation: Evaluation, memory: Memory) -> float:
    """Return the largest difference of two validation losses that is likely to be chance.

    The noise is how far the evaluations before this one go up and down; until they have done so,
    that of the training loss, as if one batch were evaluated. Call once for each evaluation: its
    loss is kept in `memory["val_losses"]`.
    """
    before: list[float] = memory.get("val_losses", [])
    if math.isfinite(evaluation.val_loss):
        memory["val_losses"] = [*before, evaluation.val_loss][-KEPT:]
    deviations = DEVIATIONS * math.sqrt(2)
    if len(before) < FEWEST:
        return deviations * _of_a_batch(record, evaluation)
    up_and_down = _zigzag(before)
    if not up_and_down:
        # Nothing has gone up and come down again: noise is at most as large as the largest fall.
        fall = max(0.0, float(np.max(-np.diff(np.array(before)))))
        return deviations * min(fall, _of_a_batch(record, evaluation))
    difference = deviations * up_and_down
    if min(before) > 0 and evaluation.val_loss > 0:
        # Losses that differ by a factor from batch to batch are compared as factors.
        factor = math.exp(deviations * _zigzag([math.log(loss) for loss in before]))
        difference = max(difference, evaluation.val_loss * (1 - 1 / factor))
    return difference


def is_usual_batch(record: Record, evaluation: Evaluation) -> bool:
    """Return whether a batch of the last training steps had a loss as high as this evaluation."""
    recent = [*record.history.losses][-BATCHES:]
    return len(recent) == BATCHES and evaluation.val_loss <= max(recent)


def _zigzag(losses: list[float]) -> float:
    """Return the standard deviation of losses that go up and down.

    Of two moves in a row in opposite directions the smaller one is noise. A curve that only falls
    has none, and one that turns, as in overfitting, hardly any.
    """
    moves = np.diff(np.array(losses))
    size = np.abs(moves)
    undone = np.where(moves[1:] * moves[:-1] < 0, np.minimum(size[1:], size[:-1]), 0.0)
    # A few moves may be small by chance: the fewer there are, the larger the noise may be.
    return float(np.mean(undone)) / _UNDONE * (1 + 3 / len(undone))


def _of_a_batch(record: Record, evaluation: Evaluation) -> float:
    """Return the noise of the training loss, in proportion where the validation loss is larger."""
    recent = [*record.history.losses][-BATCHES:]
    if len(recent) < BATCHES or not math.isfinite(evaluation.val_loss):
        return record.history.noise
    usual = statistics.median(recent)
    # Where some batches are much harder than most, their distance is what chance makes.
    largest = float(np.abs(np.diff(np.array(recent))).max())
    noise = max(record.history.noise, largest / _LARGEST)
    return noise * max(1.0, abs(evaluation.val_loss / usual) if usual else 1.0)

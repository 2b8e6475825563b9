"""What an evaluation shows: how far its loss differs by chance, and whether that matters.

Many trainers evaluate on a single batch.
"""

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


def number(value: float | None) -> float:
    """Return NaN for None: comparisons with it are false, so nothing is reported."""
    return float("nan") if value is None else value


def at(evaluation: Evaluation) -> str:
    """Return the words for where an evaluation is in the run."""
    return f"at evaluation {evaluation.number} (step {evaluation.step})"


def training_falls(each: Evaluation) -> bool:
    """Return whether the training loss is lower than at the previous evaluation."""
    return number(each.train_improvement) > 0


def share_of_run(evaluation: Evaluation, memory: Memory) -> float:
    """Return the share of the run so far between an evaluation and the previous one.

    Late in a run, or after a resume without state, two evaluations are close together compared with
    the steps before them, and their losses are similar in a healthy run too. The step of the
    previous evaluation is kept in `memory["evaluated"]`; without it, evaluations are assumed to be
    evenly spaced.
    """
    before = memory.get("evaluated", evaluation.step * (1 - 1 / evaluation.number))
    memory["evaluated"] = evaluation.step
    return (evaluation.step - before) / evaluation.step if evaluation.step > 0 else 1.0


def matters(record: Record, difference: float, share: float) -> bool:
    """Return whether a difference of losses is a part of the progress that the run has made.

    Of a loss near zero, or one that has no natural zero, a relative difference means nothing.
    """
    start, best = record.history.start, record.history.best
    return start is None or best is None or difference > share * (start - best)


def lost_generalization(record: Record, val_loss: float, best: float) -> float:
    """Return (validation loss - its best) / (training loss at the start - its best).

    1: as bad as before training. Inf where the validation loss was never below that start.
    """
    start = record.history.start
    if start is None or start <= best:
        return math.inf
    return (val_loss - best) / (start - best)


def generalized(record: Record, each: Evaluation) -> float:
    """Return the share of the progress of training that validation shows; 0 when not known."""
    start, train = record.history.start, each.train_loss
    if start is None or train is None or start <= train:
        return 0.0
    return (start - each.val_loss) / (start - train)


def chance_rate(record: Record, each: Evaluation, memory: Memory) -> float:
    """Return the improvement over the previous evaluation that chance can make or hide."""
    difference = chance_difference(record, each, memory)
    left = 1 - number(each.improvement)
    return difference * abs(left / each.val_loss) if each.val_loss else 0.0


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

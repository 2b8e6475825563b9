"""The second sign that makes a warning of what alone is an info."""

from __future__ import annotations

import statistics
from itertools import pairwise
from math import isfinite
from typing import Final

from distmon.record.record import Record
from distmon.rules.base import metric

NORM_FACTOR: Final = 3.0
"""Times its median: a gradient norm that rises. Healthy runs of the tuning half stay below 3.0
except for SGD at the end of a run, where the norm of a converged model is noise."""
NOISE: Final = 6.0
"""Standard deviations above its best: a loss that rises."""
FEWEST_LOSSES: Final = 12
"""Steps before anything is known about the noise of the loss."""
USUAL: Final = 1.5
"""Times the largest rise that the run has recovered from lately: a rise that is not usual."""
LOST: Final = 0.1
"""Share of the progress since the start that a rising loss has lost."""
FLAT: Final = 0.3
"""Share of its start that a loss has to fall by before its progress is the measure of a rise."""
FEWEST_CLIMBS: Final = 4
"""Observations from the best one on before a rise can be called gradual."""
GRADUAL: Final = 0.5
"""Largest share of a rise in one observation that is gradual."""
LARGE_UPDATE: Final = 0.05
"""Median update ratio of a rate that is too high."""
RESTART: Final = 1.5
"""Times the learning rate of the best loss: the schedule has started again."""


def loss_growth(record: Record) -> float:
    """Return the loss over its median of the last observations; at least 1.

    Gradients are as large as the loss that they are of. 1 where the loss has no natural zero.
    """
    history = record.history
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    usual = statistics.median(history.middles) if history.middles else 0.0
    if not losses or usual <= 0 or history.negative or min(losses) <= 0:
        return 1.0
    return max(1.0, statistics.median(losses) / usual)


def second_sign(record: Record) -> str:
    """Return what else says that training gets out of hand, in words; empty when nothing does."""
    history = record.history
    norm, usual = metric(record, "monitor/grad_norm"), history.norm_median
    if norm is not None and usual and norm > NORM_FACTOR * usual:
        return f"the gradient norm rises too: {norm:.3g}, {norm / usual:.1f}x its median"
    rise = lost_progress(record)
    if rise is not None and rise > LOST:
        return f"the loss rises too: it has lost {rise:.0%} of its progress"
    return ""


def lost_progress(record: Record) -> float | None:
    """Return (now - best) / (start - best) of the loss; None when nothing can be said.

    `now` is the median since the last record. It has to be above the best by more than the noise
    from step to step, and by more than this run has risen and recovered before. Of a loss that
    fell little, the rise is counted in units of its start. While a schedule starts again, at a rate
    that the run has had before, a loss may rise as far as where it began.
    """
    history = record.history
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    start, best = history.start, history.best
    if not losses or start is None or best is None or len(history.losses) < FEWEST_LOSSES:
        return None
    now = statistics.median(losses)
    if now - best <= max(NOISE * history.noise, USUAL * history.usual_rise):
        return 0.0
    lr, then, peak = metric(record, "train/lr"), history.lr_at_best, history.lr_peak
    if lr and then and peak and RESTART * then < lr <= 1.01 * peak and now < start:
        return 0.0
    # The scale of a loss above zero is where it started: one that fell by less is as good as flat.
    flat = 0.0 if history.negative else FLAT * abs(start)
    progress = max(start - best, flat, NOISE * history.noise)
    return (now - best) / progress if progress > 0 else None


def gets_out_of_hand(record: Record) -> bool:
    """Return whether updates are large, or the gradient has grown by more than the loss."""
    norm, usual = metric(record, "monitor/grad_norm"), record.history.norm_median
    ratio = metric(record, "monitor/update_ratio_median") or 0.0
    large = norm is None or not usual or norm > NORM_FACTOR * usual * loss_growth(record)
    return large or ratio > LARGE_UPDATE


def rises_gradually(record: Record) -> bool:
    """Return whether the loss climbs little by little, with gradients that grow no more than it.

    The weight of a term that is raised over the run makes a loss climb like that, and so do data
    that becomes harder, targets that grow, weights that are pruned, and distances between latents.
    Bad data comes at once; a rate that is too high makes large updates.
    """
    history = record.history
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    if not losses or gets_out_of_hand(record):
        return False
    middles = [*history.middles, statistics.median(losses)]
    lowest = max(i for i, middle in enumerate(middles) if middle == min(middles))
    climb = middles[lowest:]
    if len(climb) < FEWEST_CLIMBS:
        return False
    # One observation that is out of line makes no jump.
    middle = [statistics.median(climb[i - 1 : i + 2]) for i in range(1, len(climb) - 1)]
    steps = [b - a for a, b in pairwise([climb[0], *middle, climb[-1]])]
    return max(steps) <= GRADUAL * (climb[-1] - climb[0])

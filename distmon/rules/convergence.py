"""Convergence: a training loss that stops improving or diverges."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from math import isfinite

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, tighten_clipping
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, metric
from distmon.rules.lr_schedule import lr_phase

LOSS_EMA = "train/step_loss_ema"
_POINTS = 20
"""Number of averages kept per window."""


def check_plateau(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the average loss with its value one window ago.

    The window grows with the run: late in a long run, a healthy loss falls only a little in any
    fixed number of steps.
    """
    phase, now = lr_phase(record, memory), metric(record, LOSS_EMA)
    if now is None:
        return
    window = max(limits["window"], limits["share"] * record.step)
    points = [point for point in memory.get("points", []) if point[0] < record.step]
    if not points or record.step - points[-1][0] >= window / _POINTS:
        points.append([record.step, now])
    old = [point for point in points if point[0] <= record.step - window]
    memory["points"] = points[max(0, len(old) - 1) :]
    if not old or phase in ("rising", "ending", "off"):
        return
    step, then = old[-1]
    change = abs(now - then) / max(abs(then), 1e-12)
    if change < limits["change"]:
        yield Finding(
            key="plateau",
            message=f"the average loss changed by {change:.2%}, from {then:.4g} to {now:.4g}, in "
            f"the {record.step - step} steps since step {step} (limit {limits['change']:.0%})",
            advice=(lower_lr(record), *_ADVICE[1:]),
            measured=change,
            threshold=limits["change"],
        )


def check_best(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Count the steps since the average loss was lowest."""
    phase, now = lr_phase(record, memory), metric(record, LOSS_EMA)
    if now is None:
        return
    best = memory.get("best", now)
    since = memory.get("step", record.step)
    if best - now > limits["better"] * abs(best) or "best" not in memory or since > record.step:
        memory["best"], memory["step"] = now, record.step
        return
    waited = record.step - since
    if waited >= limits["steps"] and phase not in ("ending", "off"):
        yield Finding(
            key="best",
            message=f"the average loss was lowest, {best:.4g}, at step {since}, {waited} steps "
            f"ago; it is {now:.4g} now (limit {limits['steps']:g} steps)",
            advice=(lower_lr(record), *_ADVICE[1:]),
            measured=float(waited),
            threshold=limits["steps"],
        )


def check_divergence(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the losses since the last record with the best average.

    It finds a rise that is too slow for `loss_spike`, and uses the median loss so that one bad
    batch does not count.
    """
    average = metric(record, LOSS_EMA)
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    if average is None or not losses:
        return
    best = memory.get("best", average)
    memory["best"] = min(best, average)
    now = statistics.median(losses)
    limit = (1 + limits["rise"]) * best
    if best > 0 and now > limit - MARGIN * limits["rise"] * best:
        yield Finding(
            key="divergence",
            message=f"the loss is {now:.4g}, {now / best - 1:.0%} above its best average "
            f"{best:.4g} (limit {limits['rise']:.0%}): training diverges",
            advice=(lower_lr(record), tighten_clipping(record), *_ADVICE_DIVERGENCE[2:]),
            measured=now / best - 1,
            threshold=limits["rise"],
            fading=now <= limit,
        )


_ADVICE_DIVERGENCE = (
    "halve the learning rate",
    "tighten gradient clipping",
    "resume from a checkpoint before the rise",
)
_ADVICE = (
    "halve the learning rate",
    "if the loss has never fallen since the start, double the learning rate instead and check that "
    "labels match inputs",
    "if the loss is low enough, stop: the run has converged",
)

RULES = (
    Rule(
        name="loss_divergence",
        summary="median loss since the last observation > rise above the best average",
        check=check_divergence,
        severity="warning",
        patience=3,
        needs=(LOSS_EMA,),
        thresholds={"rise": Threshold(0.5, "relative rise above the best average")},
        advice=_ADVICE_DIVERGENCE,
    ),
    Rule(
        name="loss_plateau",
        summary="average loss changed < change over the last `window` steps, or `share` of the run "
        "if that is more; not during warmup or after the lr has decayed",
        check=check_plateau,
        severity="warning",
        patience=2,
        cooldown=20,
        needs=(LOSS_EMA,),
        thresholds={
            "change": Threshold(0.01, "relative change below which the loss is on a plateau"),
            "window": Threshold(2000, "steps"),
            "share": Threshold(0.33, "minimum window as a share of the run so far"),
        },
        advice=_ADVICE,
    ),
    Rule(
        name="no_improvement",
        summary="best average loss not improved by > better for `steps` steps",
        check=check_best,
        severity="warning",
        cooldown=20,
        needs=(LOSS_EMA,),
        thresholds={
            "steps": Threshold(10_000, "steps without a better average"),
            "better": Threshold(0.001, "relative improvement that counts"),
        },
        advice=_ADVICE,
    ),
)

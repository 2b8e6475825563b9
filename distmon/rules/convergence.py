"""Convergence: a training loss that stops improving or diverges."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from math import isfinite

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, ranked_causes
from distmon.rules.alert import Severity
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, metric
from distmon.rules.lr_schedule import lr_phase
from distmon.rules.pruning import pruning_explains
from distmon.rules.second_sign import gets_out_of_hand, lost_progress, rises_gradually

LOSS_EMA = "train/step_loss_ema"
_POINTS = 20
"""Number of averages kept per window."""


def _plateau_advice(record: Record) -> tuple[str, ...]:
    """Advise by what the loss did: one that has fallen asks for a lower rate."""
    start, best = record.history.start, record.history.best
    fell = start is not None and best is not None and best < start - 0.05 * abs(start)
    return (lower_lr(record), _ADVICE[2]) if fell else (_ADVICE[1], _ADVICE[2])


def _converged(record: Record) -> Severity | None:
    """Return `info` for a loss that has come down and stays at its best: it has converged."""
    return "info" if record.history.has_fallen and lost_progress(record) == 0.0 else None


def check_plateau(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the average loss with its value one window ago.

    The window grows with the run: late in a long run, a healthy loss falls only a little in any
    fixed number of steps.
    """
    phase, now = lr_phase(record, memory), metric(record, LOSS_EMA)
    if now is None or record.history.need_not_fall(record):
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
            advice=_plateau_advice(record),
            severity=_converged(record),
            measured=change,
            threshold=limits["change"],
        )


def check_best(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Count the steps since the average loss was lowest."""
    phase, now = lr_phase(record, memory), metric(record, LOSS_EMA)
    if now is None or record.history.need_not_fall(record):
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
            advice=_plateau_advice(record),
            measured=float(waited),
            threshold=limits["steps"],
        )


def check_divergence(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a loss that has lost a part of its progress.

    (now - best) / (start - best) does not depend on the unit of the loss, nor on where its zero is.
    It finds a rise that is too slow for `loss_spike`, and uses the median loss so that one bad
    batch does not count. A loss that comes down again, from another task or a part that was reset,
    does not diverge.
    """
    lost = lost_progress(record)
    before, memory["height"] = memory.get("height", 0.0), _height(record)
    pruned = pruning_explains(record, memory)
    if lost is None or record.history.need_not_fall(record):
        return
    returns = memory["height"] < (1 - limits["returns"]) * before
    if lost <= 0:
        memory.pop("gradual", None)
    if lost > (1 - MARGIN) * limits["lost"]:
        now, best = _middle(record), record.history.best
        # A level that was reached gradually before is no news.
        known = now <= memory.get("gradual", now - 1)
        # Progress that was never made cannot be lost: then there has to be another sign.
        alone = not record.history.has_fallen and not gets_out_of_hand(record)
        gradual = known or alone or rises_gradually(record)
        if gradual:
            memory["gradual"] = max(memory.get("gradual", now), now)
        yield Finding(
            key="divergence",
            message=f"the loss is {now:.4g} and was {best:.4g}: it has lost {lost:.0%} of its "
            f"progress since the start (limit {limits['lost']:.0%})"
            f"{', since weights were pruned' if pruned else ''}",
            advice=_ADVICE_PRUNED if pruned else ranked_causes(record),
            severity="info" if pruned or gradual else None,
            measured=lost,
            threshold=limits["lost"],
            fading=lost <= limits["lost"] or returns,
            once=True,
        )


def _height(record: Record) -> float:
    """Return how far the loss is above its best."""
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    best = record.history.best
    return max(0.0, statistics.median(losses) - best) if losses and best is not None else 0.0


def _middle(record: Record) -> float:
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    return statistics.median(losses)


_ADVICE_DIVERGENCE = (
    "resume from a checkpoint before the rise",
    "check the learning rate and the data of the steps before it",
)
_ADVICE_PRUNED = (
    "prune less, in smaller parts, or at a higher learning rate, so that the loss comes back",
    "if this loss is meant for this sparsity, ignore this alert",
)
_ADVICE = (
    "if the loss has fallen before, lower the learning rate or begin its decay",
    "if it has never fallen, check that labels match inputs",
    "if the loss is low enough, stop: the run has converged",
)

RULES = (
    Rule(
        name="loss_divergence",
        summary="(median loss - best) / (start - best) > lost, and the rise is above the noise",
        check=check_divergence,
        severity="warning",
        patience=2,
        needs=(LOSS_EMA,),
        thresholds={
            "lost": Threshold(0.2, "share of its progress that the loss has lost"),
            "returns": Threshold(0.1, "of its height above the best by which it comes down again"),
        },
        advice=_ADVICE_DIVERGENCE,
    ),
    Rule(
        name="loss_plateau",
        summary="average loss changed < change over the last `window` steps, or `share` of the run "
        "if that is more; an info once it has fallen; not during warmup or after the lr has "
        "decayed",
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

"""Validation against training loss: overfitting, a rise, underfitting."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from distmon.record.record import Evaluation, Record
from distmon.rules.advice import raise_lr
from distmon.rules.alert import Severity
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold
from distmon.rules.evaluation_evidence import (
    at,
    chance_difference,
    generalized,
    is_usual_batch,
    lost_generalization,
    matters,
    number,
    training_falls,
)

_TURNED = 0.1
"""Rise above its best of a validation loss that has been better before."""
_LOWEST = 1.5
"""Times the difference that chance makes of two evaluations: that from the lowest of many."""


def _early(evaluation: Evaluation, limits: Limits) -> bool:
    """Return whether the rule applies to this evaluation, by `until_evaluation`."""
    until = limits["until_evaluation"]
    return evaluation.number >= 2 and (until == 0 or evaluation.number <= until)


def _seen_often_enough(record: Record, each: Evaluation, memory: Memory, high: bool) -> bool:
    """Return whether a loss is too high twice in a row, or once as no training batch was lately."""
    memory["high"] = memory.get("high", 0) + 1 if high else 0
    return memory["high"] > 1 or (high and not is_usual_batch(record, each))


def check_overfit(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a validation loss above the training loss.

    A model that learns its data by heart has such a gap, and most of them generalize: it is a
    warning where validation shows little of what training has learned, and got no better.
    """
    for each in record.evaluations:
        best = min(memory.get("best", each.val_loss), each.val_loss)
        memory["best"] = best
        gap, train = number(each.gap), number(each.train_loss)
        # What is left of the gap if chance made as much of it as it can.
        certain = gap - chance_difference(record, each, memory) / abs(train) if train else gap
        mild = limits["mild"] < certain <= limits["severe"] and _early(each, limits)
        high = mild or certain > (1 - MARGIN) * limits["severe"]
        if not _seen_often_enough(record, each, memory, high):
            continue
        if not matters(record, each.val_loss - train, limits["progress"]):
            continue
        improves = each.improvement is None or each.improvement > limits["improves"]
        shown = generalized(record, each)
        # What got better and then worse is a matter of `val_increase`.
        turned = best < each.val_loss / (1 + _TURNED) if best > 0 else False
        harmless = shown > limits["generalized"] or turned
        limit = limits["mild" if mild else "severe"]
        yield Finding(
            key="gap",
            message=f"{'mild' if mild else 'severe'} overfitting {at(each)}: the validation loss "
            f"{each.val_loss:.4g} is {gap:.0%} above the training loss "
            f"{train:.4g} (limit {limit:.0%})",
            severity="info" if mild or improves or harmless else None,
            measured=gap,
            threshold=limit,
            fading=certain <= limit,
        )


def check_increase(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a validation loss that rises, by more than chance makes."""
    for each in record.evaluations:
        if not isfinite(each.val_loss):
            continue
        best = min(memory.get("best", each.val_loss), each.val_loss)
        memory["best"] = best
        rise = each.val_loss - memory.get("val_losses", [each.val_loss])[-1]
        chance = chance_difference(record, each, memory)
        risen = -number(each.improvement) > limits["noise"] and rise > chance
        diverging = risen and training_falls(each)
        memory["apart"] = memory.get("apart", 0) + 1 if diverging else 0
        above = (each.val_loss - best) / best if best > 0 else 0.0
        training = ", while the training loss falls" if diverging else ""
        lost = lost_generalization(record, each.val_loss, best)
        severity: Severity | None = None if lost > limits["lost"] else "info"
        # The lowest of several is lower than usual by chance, this one higher.
        certain = above - _LOWEST * chance / best if best > 0 else 0.0
        high = certain > (1 - MARGIN) * limits["rise"]
        confirmed = _seen_often_enough(record, each, memory, high)
        if not matters(record, each.val_loss - best, limits["progress"]):
            continue
        if high and confirmed:
            yield Finding(
                key="increase",
                message=f"the validation loss is {each.val_loss:.4g} {at(each)}, {above:.0%} "
                f"above its best {best:.4g} (limit {limits['rise']:.0%}){training}",
                severity=severity,
                measured=above,
                threshold=limits["rise"],
                fading=certain <= limits["rise"],
            )
        elif memory["apart"] >= limits["apart"]:
            yield Finding(
                key="increase",
                message=f"the validation loss rose {memory['apart']} times in a row while the "
                f"training loss fell; it is {each.val_loss:.4g} {at(each)}, {above:.1%} above its "
                f"best {best:.4g}",
                severity=severity,
                measured=float(memory["apart"]),
                threshold=limits["apart"],
            )


def check_underfit(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find training and validation losses that are close together and both fall slowly."""
    for each in record.evaluations:
        rates = number(each.improvement), number(each.train_improvement)
        slowly = all(limits["slowest"] <= rate <= limits["fastest"] for rate in rates)
        # A model that has learned much of what there is goes on slowly.
        start = record.history.start
        learned = start is not None and start > 0 and each.val_loss < limits["left"] * start
        if learned and not record.history.negative:
            continue
        if _early(each, limits) and abs(number(each.gap)) < limits["gap"] and slowly:
            yield Finding(
                key="underfit",
                message=f"the model underfits {at(each)}: training {number(each.train_loss):.4g} "
                f"and validation {each.val_loss:.4g} are {number(each.gap):.1%} apart (below "
                f"{limits['gap']:.0%}) and fall slowly, by {rates[1]:.1%} and {rates[0]:.1%}",
                advice=(*_ADVICE_UNDERFIT[:2], raise_lr(record)),
                measured=number(each.gap),
                threshold=limits["gap"],
            )


_ADVICE_UNDERFIT = (
    "train longer: both losses still fall",
    "use a larger model, or less weight decay and dropout",
    "raise the learning rate",
)
_PROGRESS = {"progress": Threshold(0.05, "share of the progress so far that counts")}
_UNTIL = {"until_evaluation": Threshold(3, "last evaluation that the rule checks; 0: no limit")}

RULES = (
    Rule(
        name="overfit",
        summary="validation above training loss by > severe, an info while it improves; > mild "
        "(info) until `until_evaluation`",
        check=check_overfit,
        severity="warning",
        needs=("evaluations",),
        thresholds={
            "mild": Threshold(0.1, "gap above which it is mild"),
            "severe": Threshold(0.3, "gap above which it is severe"),
            "improves": Threshold(0.01, "improvement of the validation loss that makes it an info"),
            "generalized": Threshold(
                0.25, "share of the progress of training that validation shows"
            ),
            **_PROGRESS,
            **_UNTIL,
        },
        advice=(
            "train on more or more varied data, or for fewer epochs",
            "raise weight decay or dropout, or use a smaller model",
            "keep the checkpoint with the best validation loss and stop when it rises",
        ),
    ),
    Rule(
        name="val_increase",
        summary="validation loss > rise above its best, or rising `apart` times in a row while "
        "training falls",
        check=check_increase,
        severity="warning",
        needs=("evaluations",),
        thresholds={
            "rise": Threshold(0.1, "above the best validation loss"),
            "apart": Threshold(2, "evaluations in a row that rise while training falls"),
            "noise": Threshold(0.01, "relative rise that is ignored as noise"),
            "lost": Threshold(0.5, "share of its progress that a warning needs it to have lost"),
            **_PROGRESS,
        },
        advice=(
            "resume from the checkpoint with the best validation loss",
            "if the training loss falls, the model overfits: more data, more weight decay, dropout",
            "if it rises too, halve the learning rate and look at the data of the last steps",
        ),
    ),
    Rule(
        name="underfit",
        summary="gap < gap while both losses fall by slowest..fastest, until `until_evaluation`",
        check=check_underfit,
        severity="info",
        needs=("evaluations",),
        thresholds={
            "gap": Threshold(0.1, "gap below which both losses count as equal"),
            "slowest": Threshold(0.01, "improvement below which the loss counts as unchanged"),
            "fastest": Threshold(0.15, "improvement above which it is fast"),
            "left": Threshold(0.7, "share of the loss at the start that is left"),
            **_UNTIL,
        },
        advice=_ADVICE_UNDERFIT,
    ),
)

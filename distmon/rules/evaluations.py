"""Validation loss: slow improvement, and none."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record.record import Record
from distmon.rules.advice import lower_lr
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold
from distmon.rules.evaluation_evidence import (
    at,
    chance_rate,
    number,
    share_of_run,
    training_falls,
)
from distmon.rules.lr_schedule import lr_phase

_PLATEAU = 3
"""Evaluations in a row without a change."""


def check_slow(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find evaluations that improve too little on the previous one, whatever their noise hides."""
    phase = lr_phase(record, memory)
    for each in record.evaluations:
        rate, chance = number(each.improvement), chance_rate(record, each, memory)
        # Three in a row are reported by `eval_plateau`; a rate that warms up or has decayed
        # explains slow improvement.
        applies = each.unchanged < _PLATEAU and phase not in ("rising", "ending")
        poor = -limits["worse"] <= rate < limits["poor"] - chance
        if rate < 0 and training_falls(each):
            poor = False  # it overfits: that is what `overfit` and `val_increase` are for
        memory["poor"] = memory.get("poor", 0) + 1 if poor else 0
        # While the training loss comes down, one such evaluation is no news.
        comes_down = _comes_down(record)
        applies &= memory["poor"] > 1 or not comes_down
        if share_of_run(each, memory) >= limits["share"] and applies and poor:
            before = each.val_loss / (1 - rate)
            moved = f"improved by {rate:.2%}" if rate >= 0 else f"rose by {-rate:.2%}"
            yield Finding(
                key="slow",
                message=f"the validation loss {moved} {at(each)}, from {before:.4g} to "
                f"{each.val_loss:.4g} (poor below {limits['poor']:.0%}, good above "
                f"{limits['good']:.0%})",
                severity="info" if comes_down else None,
                measured=rate,
                threshold=limits["poor"],
            )


def _comes_down(record: Record) -> bool:
    """Return whether the training loss has come down or does so, however slowly."""
    history = record.history
    return history.has_fallen or (len(history.losses) > 0 and history.falls)


def check_plateau(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find evaluations in a row with hardly any change."""
    phase = lr_phase(record, memory)
    for each in record.evaluations:
        if each.unchanged >= limits["evaluations"] and phase != "ending":
            yield Finding(
                key="plateau",
                message=f"the validation loss has hardly changed for {each.unchanged} evaluations "
                f"(each by less than 1%); it is {each.val_loss:.4g} {at(each)}",
                advice=(lower_lr(record), *_ADVICE_PLATEAU[1:]),
                severity="info" if _comes_down(record) else None,
                measured=float(each.unchanged),
                threshold=limits["evaluations"],
            )


_ADVICE_PLATEAU = (
    "halve the learning rate, or begin its decay",
    "if the training loss still falls, the model overfits: more data or regularization",
    "if neither changes and both are good enough, stop the run",
)

RULES = (
    Rule(
        name="slow_improvement",
        summary="validation loss better by < poor; an info once the loss has fallen; not when the "
        "lr has decayed",
        check=check_slow,
        severity="warning",
        needs=("evaluations",),
        thresholds={
            "poor": Threshold(0.01, "improvement below which it is poor"),
            "good": Threshold(0.05, "improvement above which it is good"),
            "worse": Threshold(0.1, "rise above which val_increase reports it instead"),
            "share": Threshold(0.1, "minimum share of the run between two evaluations"),
        },
        advice=(
            "compare with the training loss: if it still falls, the model overfits",
            "double the learning rate if both losses have been slow from the start, halve it if "
            "both fell fast before",
            "use a larger model or more varied data if neither changes",
        ),
    ),
    Rule(
        name="eval_plateau",
        summary="validation loss changed < 1% in each of `evaluations`; not when the lr has "
        "decayed; an info once the loss has fallen",
        check=check_plateau,
        severity="warning",
        needs=("evaluations",),
        thresholds={"evaluations": Threshold(3, "evaluations in a row without a change")},
        advice=_ADVICE_PLATEAU,
    ),
)

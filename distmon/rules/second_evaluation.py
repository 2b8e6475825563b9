"""The learning rate, from how the first two evaluations differ."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, raise_lr
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold
from distmon.rules.evaluation_evidence import (
    chance_rate,
    matters,
    number,
    share_of_run,
    training_falls,
)


def check_lr(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the second evaluation with the first: did the loss fall, stay or rise?"""
    for each in record.evaluations:
        chance = chance_rate(record, each, memory)
        if share_of_run(each, memory) < limits["share"] or each.number != 2:
            continue
        rate = number(each.improvement)
        risen = each.val_loss - each.val_loss / (1 - rate) if rate < 0 else 0.0
        if -rate > limits["spiked"] + chance:
            # While the training loss falls, the model overfits; the rate is not to blame.
            if training_falls(each) or not matters(record, risen, limits["progress"]):
                continue
            yield Finding(
                key="high",
                message=f"the validation loss rose by {-rate:.0%} to {each.val_loss:.4g} between "
                f"the first two evaluations (limit {limits['spiked']:.0%}): the learning rate is "
                "too high",
                severity="warning",
                advice=(lower_lr(record), *_ADVICE_LR[1:]),
                measured=-rate,
                threshold=limits["spiked"],
            )
        elif abs(rate) < limits["moved"] - chance:
            yield Finding(
                key="low",
                message=f"the validation loss moved by {rate:.2%} to {each.val_loss:.4g} between "
                f"the first two evaluations (limit {limits['moved']:.0%}): the learning rate looks "
                "too low",
                advice=(raise_lr(record), *_ADVICE_LR[1:]),
                measured=abs(rate),
                threshold=limits["moved"],
            )


_ADVICE_LR = (
    "halve the learning rate if the loss rose, double it if it did not change",
    "run a short sweep over learning rates, each 3x the previous one",
    "compare the length of the warmup with the steps between the two evaluations",
)

RULES = (
    Rule(
        name="lr_check",
        summary="from the first to the second evaluation the loss rose by > spiked (warning), or "
        "moved by < moved",
        check=check_lr,
        severity="info",
        needs=("evaluations",),
        thresholds={
            "moved": Threshold(0.01, "relative change below which the lr is too low"),
            "spiked": Threshold(0.1, "relative rise above which the lr is too high"),
            "progress": Threshold(0.05, "share of the progress so far that counts"),
            "share": Threshold(0.33, "minimum share of the run between the two"),
        },
        advice=_ADVICE_LR,
    ),
)

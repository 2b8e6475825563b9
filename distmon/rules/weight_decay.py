"""Weight decay that takes away what a step has learned before the next steps can use it."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, number
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric
from distmon.rules.second_sign import LOST, lost_progress
from distmon.rules.training_loop import rank_values

_USUAL = 0.1
"""Weight decay that many recipes have; more than that times the rate is a matter of the rate."""


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find lr x weight decay that is a noticeable share of the weights in every step.

    Weights under decay come to rest where a step changes them by the root of twice that share.
    """
    found = rank_values(record, "decay_per_step")
    if not found.size or found.max() <= limits["share"]:
        return
    share, history = float(found.max()), record.history
    learns = history.has_fallen and not (lost_progress(record) or 0.0) > LOST
    lr = metric(record, "train/lr")
    usual_decay = bool(lr) and share / (lr or 1.0) <= _USUAL
    yield Finding(
        key="decay",
        message=f"weight decay alone takes {share:.1%} of the weights in each step (limit "
        f"{limits['share']:.0%}): after {1 / share:.0f} steps little is left of what was learned"
        f"{'' if learns else ', and the loss has not come down'}",
        severity="info" if learns else None,
        advice=(
            f"{lower_lr(record)}, or to a tenth: the weight decay of {number(share / (lr or 1.0))} "
            "is usual, the rate that it is multiplied with is not",
        )
        if usual_decay
        else (
            f"lower the weight decay by a factor of {number(max(10.0, share / 1e-3))}: usual is "
            "lr x weight decay of 1e-5 to 1e-3 per step",
            "check that the decay is meant for this optimizer: decoupled, as in AdamW and Lion, it "
            "is not divided by the size of the gradient",
        ),
        measured=share,
        threshold=limits["share"],
    )


RULES = (
    Rule(
        name="weight_decay_high",
        summary="lr x weight decay > share of the weights per step, while the loss has not come "
        "down; else an info",
        check=check,
        severity="warning",
        patience=3,
        cooldown=50,
        needs=("ranks.decay_per_step",),
        thresholds={"share": Threshold(0.02, "of the weights that decay takes in one step")},
        advice=("lower the weight decay",),
    ),
)

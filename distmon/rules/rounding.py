"""Updates that are lost because low-precision weights cannot hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.lr_schedule import lr_phase

FULL_PRECISION: Final = 1e-6
"""Half units in the last place, of the weight: 6e-8 at most in fp32, 2e-4 or more in fp16."""


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find matrices most of whose elements have a gradient but do not move."""
    if lr_phase(record, memory) in ("ending", "off"):
        return  # updates become small on purpose
    c = record.params.columns
    with np.errstate(invalid="ignore"):
        lost = (c["update_lost_fraction"] > limits["fraction"]) & (c["ndim"] >= 2)
        lost &= (c["requires_grad"] > 0) & ~(c["lr"] == 0) & (c["update_ratio"] > 0)
        # What rounding can have taken has to matter beside what was applied.
        lost &= c["update_lost_bound"] > limits["bound"] * c["update_norm"]
        # In fp32 such updates are too small by themselves: `not_learning` and others say so.
        lost &= is_coarse(record)
    rows = np.flatnonzero(lost)
    for i in rows[np.argsort(-c["update_lost_fraction"][rows], kind="stable")]:
        name = record.params.names[i]
        yield Finding(
            key=name,
            message="",
            params=(name,),
            measured=float(c["update_lost_fraction"][i]),
            threshold=limits["fraction"],
        )


def is_coarse(record: Record) -> NDArray[np.bool_]:
    """Return the parameters in fewer bits than fp32 has."""
    c = record.params.columns
    with np.errstate(invalid="ignore"):
        return np.asarray(c["update_lost_bound"] > FULL_PRECISION * c["weight_norm"])


def _combine_messages(findings: Sequence[Finding]) -> str:
    worst = findings[0]
    others = f"; also {name_some([f.key for f in findings[1:]])}" if len(findings) > 1 else ""
    return (
        f"{worst.measured:.0%} of the elements of {worst.key} have a gradient but did not move "
        f"(limit {worst.threshold:.0%}): their updates are lost to rounding{others}"
    )


RULES = (
    Rule(
        name="update_lost",
        summary="share of a matrix's updates that is lost to rounding > fraction; not after the lr "
        "has decayed",
        check=check,
        combine_messages=_combine_messages,
        severity="warning",
        patience=3,
        cooldown=30,
        needs=("params",),
        thresholds={
            "fraction": Threshold(0.75, "share of elements with a gradient that did not move"),
            "bound": Threshold(0.3, "of the update norm that rounding may have taken"),
        },
        advice=(
            "in bf16 or fp16 keep fp32 master weights, or use stochastic rounding",
            "check the learning rate and the clipping: both may make updates this small",
            "a larger batch with fewer, larger steps loses less than many small steps",
        ),
    ),
)

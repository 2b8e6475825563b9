"""Attention logits that grow until the softmax is a choice of one key."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

from distmon.record.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.inside_history import remember

_KIND = "attention"


def check_blowup(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find layers whose largest logit is large, and has grown.

    A logit has no unit: it is an exponent. Beyond 50 the softmax of a query is one key or a few in
    float32, and its gradient vanishes everywhere else.
    """
    if (table := record.inside.get(_KIND)) is None:
        return
    first: dict[str, float] = memory.setdefault("first", {})
    entropy = dict(zip(table.names, table.columns["relative_entropy"].tolist(), strict=True))
    found = []
    for name, (_, now) in remember(memory, table, "logit_max", 1).items():
        if isnan(now):
            continue
        start = first.setdefault(name, now)
        if now > limits["logit"] and now > limits["growth"] * max(start, 1.0):
            found.append((now, name, start))
    if not found:
        return
    now, name, start = max(found)
    names = [each for _, each, _ in sorted(found, reverse=True)]
    yield Finding(
        key="logit",
        layers=tuple(names[:3]),
        message=f"attention logits of {name} reach {now:.3g}, {start:.3g} at first (limit "
        f"{limits['logit']:g}); a query's entropy there is {entropy[name]:.0%} of its maximum; "
        f"also above the limit: {name_some(names[1:], 3) or 'none'}",
        measured=now,
        threshold=limits["logit"],
        once=True,
    )


RULES = (
    Rule(
        name="attention_blowup",
        summary="largest attention logit > logit, and > growth x that of the first measurement",
        check=check_blowup,
        severity="warning",
        patience=2,
        needs=("inside/attention_logit_max",),
        thresholds={
            "logit": Threshold(50.0, "largest logit"),
            "growth": Threshold(
                3.0, "times the largest logit of the first measurement, at least 1"
            ),
        },
        advice=(
            "normalize queries and keys (QK-norm), or cap the logits",
            "lower the learning rate, or the part of it that queries and keys get",
            "raise the weight decay of the query and key projections",
        ),
    ),
)

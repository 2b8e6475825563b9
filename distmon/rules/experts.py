"""Mixtures of experts: a router that collapses, experts that get no tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

from distmon.record.record import Record
from distmon.rules.alert import Severity
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold

_KIND = "experts"


def check_collapse(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find routers that send most tokens to few experts.

    Evenness is 1 when all experts have the same load, and 0 when all tokens go to the same experts,
    however many each of them is sent to. Few routers are even when they are new: one that has not
    been even yet gets some time.
    """
    if (table := record.inside.get(_KIND)) is None:
        return
    for name in table.names:
        row = table.row(name)
        experts, chosen = row["experts"], row["experts_per_token"]
        if not (row["fair_tokens"] >= limits["min_tokens"] and 1 <= chosen < experts):
            continue
        entropy = math.log(row["diversity"] * experts)
        evenness = (entropy - math.log(chosen)) / (math.log(experts) - math.log(chosen))
        if not evenness < limits["evenness"] * (1 + MARGIN):
            _was_even(memory, name)
            continue
        yield Finding(
            key=name,
            group="collapse",
            layers=(name,),
            message=f"the router {name} uses few of its {experts:.0f} experts: diversity "
            f"{row['diversity']:.2f}, the most used one has {row['load_max']:.1f}x its fair share, "
            f"{row['dead_fraction']:.0%} have no token",
            measured=evenness,
            threshold=limits["evenness"],
            fading=evenness >= limits["evenness"],
            severity=_severity(memory, name, limits),
            once=True,
        )


def check_dead(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find routers with experts that got no token although enough were sent."""
    if (table := record.inside.get(_KIND)) is None:
        return
    for name in table.names:
        row = table.row(name)
        dead = row["dead_fraction"]
        if row["fair_tokens"] < limits["min_tokens"]:
            continue
        if dead <= limits["fraction"]:
            _was_even(memory, name)
        if dead > 0:
            yield Finding(
                key=name,
                group="dead",
                layers=(name,),
                message=f"{dead * row['experts']:.0f} of the {row['experts']:.0f} experts of {name}"
                f" got no token in the last measurements; a fair share is {row['fair_tokens']:.0f}",
                measured=dead,
                threshold=0.0,
                severity=_severity(memory, name, limits) if dead > limits["fraction"] else "info",
                once=True,
            )


def _was_even(memory: Memory, name: str) -> None:
    memory.setdefault("even", {})[name] = True


def _severity(memory: Memory, name: str, limits: Limits) -> Severity:
    """Return that of a router that is uneven in this record, by what it was before."""
    uneven: dict[str, int] = memory.setdefault("uneven", {})
    uneven[name] = uneven.get(name, 0) + 1
    settled = name in memory.get("even", {}) or uneven[name] > limits["settling"]
    return "warning" if settled else "info"


_ADVICE = (
    "raise the weight of the load-balancing loss, or the step of the expert bias",
    "check that the router's logits are computed in float32, and lower its learning rate",
    "add noise to the router's input while training (jitter)",
)
_COMMON = {
    "min_tokens": Threshold(32, "assignments per expert in the window: fewer say nothing"),
    "settling": Threshold(6, "measurements that a new router has to become even"),
}
RULES = (
    Rule(
        name="router_collapse",
        summary="evenness of the experts' load < evenness; of a new router an info",
        check=check_collapse,
        severity="warning",
        patience=2,
        needs=("inside/expert_diversity_min",),
        thresholds={
            "evenness": Threshold(0.4, "0: always the same experts; 1: all alike"),
            **_COMMON,
        },
        advice=_ADVICE,
        combine_messages=lambda findings: "; ".join(f.message for f in findings[:3]),
    ),
    Rule(
        name="dead_expert",
        summary="an expert without a token in the window; a warning above `fraction` of them, "
        "unless the router is new",
        check=check_dead,
        severity="warning",
        patience=2,
        needs=("inside/expert_diversity_min",),
        thresholds={"fraction": Threshold(0.2, "share of dead experts for a warning"), **_COMMON},
        advice=_ADVICE,
        combine_messages=lambda findings: "; ".join(f.message for f in findings[:3]),
    ),
)

"""NaN and Inf in losses, gradients and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from distmon.record.record import Record
from distmon.reduce.findings import NonFinite, NonFinitePlace
from distmon.rules.advice import lower_lr
from distmon.rules.alert import Alert, Severity
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric, name_some

if TYPE_CHECKING:
    from distmon.collect.finite_watch import Evidence

ADVICE = (
    "resume from the last checkpoint before it, with a lower learning rate or skipping that batch",
    "check the batch of that step and the first named parameter's inputs for overflow",
    "in fp16 use a GradScaler; in bf16 keep norms, softmax and the loss in fp32",
)


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Yield one finding while anything is not finite; it names the parameters where known."""
    found = record.nonfinite
    if found is not None and _skipped(record, found):
        return  # a GradScaler looks for its scale; `steps_skipped` counts how often
    if found is not None:
        rise = "" if memory.get("seen") else _rise_before(record, limits["rise"])
        memory["seen"] = True
        yield Finding(
            key="nonfinite",
            message=_located(found) + rise,
            advice=(lower_lr(record), *ADVICE) if rise else (),
            params=tuple(dict.fromkeys(place.param for place in found.places)),
            ranks=tuple(dict.fromkeys(place.rank for place in found.places)),
            measured=float(found.param_count),
            threshold=0.0,
            is_new=True,
        )
        return
    count = sum(record.metrics.get(f"debug/{kind}_param_count", 0.0) for kind in ("nan", "inf"))
    bad_losses = [step for step, loss in record.losses.items() if not math.isfinite(loss)]
    if count or bad_losses:
        where = f"the loss of step {bad_losses[0]}" if bad_losses else f"{count:.0f} parameters"
        yield Finding(
            key="nonfinite",
            message=f"{where} still contain{'s' if bad_losses else ''} NaN or Inf",
            measured=float(count),
            threshold=0.0,
        )


def _rise_before(record: Record, limit: float) -> str:
    """Return how far the loss rose in the steps before it was not finite, in words; else empty."""
    before: list[float] = []
    for loss in record.losses.values():
        if not math.isfinite(loss):
            break
        before.append(loss)
    start = record.history.start if record.history.start is not None else next(iter(before), None)
    if not before or start is None or len(before) == len(record.losses):
        return ""
    if max(before) - start <= limit * abs(start):
        return ""
    return (
        f". Before that the loss rose from {start:.4g} to {max(before):.4g}: training diverged, "
        "the NaN is the end of it, and the learning rate is the likely cause"
    )


def _skipped(record: Record, found: NonFinite) -> bool:
    """Return whether the step was skipped for it: weights and losses are as finite as before."""
    if not record.ranks.get("skips_expected", np.ones(1)).any():
        return False
    skips = metric(record, "train/skipped_steps") or 0.0
    spread = any(place.weight_nan or place.weight_inf for place in found.places)
    return bool(
        (skips or not record.applied)
        and not spread
        and found.places
        and all(math.isfinite(loss) for loss in record.losses.values())
    )


def immediate_alert(evidence: Evidence, severity: Severity, rank: int, located_at: int) -> Alert:
    """Return the alert of the step itself, before the ranks exchange anything."""
    return Alert(
        rule="nonfinite",
        severity=severity,
        step=evidence.step,
        message=(
            f"the {evidence.what} is {evidence.value} at step {evidence.step} on rank {rank}; "
            f"the next observation, at step {located_at}, locates it"
        ),
        ranks=(rank,),
        advice=ADVICE,
        measured=evidence.value,
    )


def _located(found: NonFinite) -> str:
    seen = f"first seen at step {found.step} through the {found.signal}"
    if found.counted_at:
        seen += f", counted at step {found.counted_at}, when it may have spread"
    if not found.places:
        return f"NaN or Inf {seen}; no weight or gradient contained one at the observation"
    first = found.places[0]
    ranks = [str(place.rank) for place in found.places if place.param == first.param]
    where = f"rank{'s' if len(ranks) > 1 else ''} {name_some(ranks)}"
    message = f"NaN or Inf {seen}: on {where}, {first.param} holds {_content(first)}"
    if found.param_count > 1:
        others = dict.fromkeys(place.param for place in found.places)
        others.pop(first.param)
        message += f"; {found.param_count - 1} others hold some too, such as "
        message += f"{name_some([*others], 3)}. {_origin(found)}"
    return message


def _origin(found: NonFinite) -> str:
    """Return what is known of where it began, when several parameters hold one."""
    if any(place.weight_nan or place.weight_inf for place in found.places):
        return (
            "It was found after a step, when it had spread: where it began is not known. "
            "Call monitor.check(grad_norm=...) before clipping to find it next time"
        )
    # The backward pass goes from the last layer to the first, and takes a NaN along.
    last = found.places[-1].param
    return f"Of those listed, {last} is the last in layer order: it began there or behind it"


def _content(place: NonFinitePlace) -> str:
    parts = (
        (place.weight_nan, "NaN in its weight"),
        (place.weight_inf, "Inf in its weight"),
        (place.grad_nan, "NaN in its gradient"),
        (place.grad_inf, "Inf in its gradient"),
    )
    return " and ".join(f"{count} {what}" for count, what in parts if count)


RULES = (
    Rule(
        name="nonfinite",
        summary="any NaN or Inf in loss, gradient or weight",
        check=check,
        severity="critical",
        advice=ADVICE,
        thresholds={
            "rise": Threshold(3.0, "rise of the loss before it, as a multiple of its start")
        },
    ),
)

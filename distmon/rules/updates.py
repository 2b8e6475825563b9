"""Updates that are too large or too small for their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distmon.record import Record
from distmon.rules.advice import lower_lr, raise_lr, tighten_clipping
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, metric, name_some
from distmon.rules.schedule import follow_lr


def check_high(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Parameters that one step changes by more than a tenth."""
    if record.step <= limits["after_step"]:
        # Weights that start at zero double every step at first, but most do not start there.
        yield from _most(record, limits["ratio"])
        return
    c = record.params.columns
    ratio, limit = c["update_ratio"], limits["ratio"]
    with np.errstate(invalid="ignore"):
        # Biases and gains may live near zero for good, and a step changes them by much of that.
        near = (ratio > (1 - MARGIN) * limit) & (c["ndim"] >= limits["min_ndim"])
    rows = np.flatnonzero(near)
    for i in rows[np.argsort(-ratio[rows], kind="stable")]:
        name = record.params.names[i]
        lower = lower_lr(record, of=f"the group of {name}", lr=float(c["lr"][i]))
        yield Finding(
            key=name,
            message="",
            params=(name,),
            advice=(lower, "lengthen the warmup", tighten_clipping(record)),
            measured=float(ratio[i]),
            threshold=limit,
            fading=not ratio[i] > limit,
        )


def _most(record: Record, limit: float) -> Iterable[Finding]:
    """At least half of all parameters, told as one."""
    median = metric(record, "monitor/update_ratio_median")
    if median is not None and median > (1 - MARGIN) * limit:
        yield Finding(
            key="median",
            group="median",
            message=f"one step changed half of the parameters by {median:.1e} of their norm or "
            f"more, more than {limit:.0e}",
            advice=(lower_lr(record), "lengthen the warmup", tighten_clipping(record)),
            measured=median,
            threshold=limit,
            fading=median <= limit,
        )


def check_low(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Parameters that move, but next to nothing."""
    c = record.params.columns
    ratio, limit = c["update_ratio"], limits["ratio"]
    with np.errstate(invalid="ignore"):
        near = (ratio < (1 + MARGIN) * limit) & (ratio > 0)
        near &= (c["frozen"] == 0) & (c["requires_grad"] > 0) & ~(c["lr"] < limits["min_lr"])
    rows = np.flatnonzero(near)
    for i in rows[np.argsort(ratio[rows], kind="stable")]:
        name = record.params.names[i]
        higher = raise_lr(record, of=f"the group of {name}", lr=float(c["lr"][i]))
        yield Finding(
            key=name,
            message="",
            params=(name,),
            advice=(higher, *_ADVICE_LOW[1:]),
            measured=float(ratio[i]),
            threshold=limit,
            fading=not ratio[i] < limit,
        )


def _tell(findings: Sequence[Finding], than: str) -> str:
    worst = findings[0]
    if worst.message:
        return worst.message
    others = f"; also {name_some([f.key for f in findings[1:]])}" if len(findings) > 1 else ""
    return (
        f"one step changed {worst.key} by {worst.measured:.1e} of its norm, "
        f"{than} {worst.threshold:.0e}{others}"
    )


def check_phase(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """The typical update ratio against what is usual at this point of a run."""
    phase = follow_lr(record, memory)
    ratio = metric(record, "monitor/update_ratio_median")
    # A warmup starts below the range and a rate that fades out ends below it, both on purpose.
    if ratio is None or record.step < limits["after_step"] or phase in ("rising", "ending", "off"):
        return
    part = "late"
    when = f"after step {limits['middle_until']:g}"
    for earlier in ("middle", "early"):
        if record.step < limits[f"{earlier}_until"]:
            part, when = earlier, f"before step {limits[f'{earlier}_until']:g}"
    low, high = limits[f"{part}_low"], limits[f"{part}_high"]
    if ratio > (1 - MARGIN) * high:
        side, limit, inside, change = "above", high, not ratio > high, lower_lr(record)
    elif ratio < (1 + MARGIN) * low:
        side, limit, inside, change = "below", low, not ratio < low, raise_lr(record)
    else:
        return
    yield Finding(
        key=side,
        message=f"the median update ratio is {ratio:.1e}, {side} the {low:.0e} to {high:.0e} that "
        f"are usual {when}",
        advice=(f"{change}, if the loss falls too slowly or unsteadily", *_ADVICE_PHASE[1:]),
        measured=ratio,
        threshold=limit,
        fading=inside,
    )


_ADVICE_LOW = (
    "raise the learning rate of its group",
    "check that its gradient is not scaled away (clipping far below the gradient norm)",
    "check the weight decay and the initial scale: a large weight hides its updates",
)
_ADVICE_PHASE = (
    "halve (double) the learning rate, if the loss falls too slowly or unsteadily",
    "small models and large batches train well above the range: leave it if the loss is fine",
)

RULES = (
    Rule(
        name="update_ratio_high",
        summary="update_ratio > ratio for `patience` observations; up to step `after_step` the "
        "median of all",
        check=check_high,
        tell=lambda findings: _tell(findings, "more than"),
        severity="warning",
        patience=2,
        needs=("params",),
        thresholds={
            "ratio": Threshold(0.1, "largest healthy update ratio"),
            "after_step": Threshold(100, "before, only the median: weights may start at zero"),
            "min_ndim": Threshold(2, "biases and gains, with fewer dimensions, are not judged"),
        },
        advice=(
            "halve the learning rate, or that of this parameter's group",
            "lengthen the warmup",
            "tighten gradient clipping",
        ),
    ),
    Rule(
        name="update_ratio_low",
        summary="0 < update_ratio < ratio for `patience` observations while lr >= min_lr",
        check=check_low,
        tell=lambda findings: _tell(findings, "less than"),
        severity="warning",
        patience=3,
        needs=("params",),
        thresholds={
            "ratio": Threshold(1e-7, "smallest healthy update ratio"),
            "min_lr": Threshold(1e-7, "a smaller learning rate explains it"),
        },
        advice=_ADVICE_LOW,
    ),
    Rule(
        name="update_ratio_phase",
        summary="median update ratio outside 1e-3..1e-2 before step 1k, 1e-4..1e-3 before 10k, "
        "1e-5..1e-4 after; not in a warmup, nor when the lr has decayed",
        check=check_phase,
        severity="info",
        patience=5,
        cooldown=50,
        needs=("monitor/update_ratio_median",),
        thresholds={
            "after_step": Threshold(200, "steps before are not judged"),
            "early_until": Threshold(1_000, "step at which the first range ends"),
            "early_low": Threshold(1e-3, "smallest usual ratio of the first range"),
            "early_high": Threshold(1e-2, "largest usual ratio of the first range"),
            "middle_until": Threshold(10_000, "step at which the second range ends"),
            "middle_low": Threshold(1e-4, "smallest usual ratio of the second range"),
            "middle_high": Threshold(1e-3, "largest usual ratio of the second range"),
            "late_low": Threshold(1e-5, "smallest usual ratio of the last range"),
            "late_high": Threshold(1e-4, "largest usual ratio of the last range"),
        },
        advice=_ADVICE_PHASE,
    ),
)

"""Updates that are too large or too small relative to their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distmon.record.record import Record
from distmon.rules.advice import before_clipping, lower_lr, raise_lr, tighten_clipping
from distmon.rules.base import (
    MARGIN,
    Finding,
    Limits,
    Memory,
    Rule,
    Threshold,
    median_of,
    metric,
    name_some,
)
from distmon.rules.lr_schedule import lr_phase
from distmon.rules.pruning import pruning_explains
from distmon.rules.second_sign import lost_progress

_HARDLY_LEFT = 1e3
"""Factor between the norms before and after clipping that is the first thing to check."""


def check_high(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find parameters with a large update ratio; an info while the loss comes down all the same."""
    pruned = pruning_explains(record, memory)
    if record.step <= limits["after_step"]:
        # Weights that start at zero have large ratios at first, but most do not start at zero.
        yield from _most(record, limits)
        return
    c = record.params.columns
    ratio, limit = c["update_ratio"], limits["ratio"]
    with np.errstate(invalid="ignore"):
        # Biases and gains may stay near zero, where every update is relatively large.
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
            severity="info" if pruned or _learns(record) else None,
            measured=float(ratio[i]),
            threshold=limit,
            fading=not ratio[i] > limit,
        )


def _learns(record: Record) -> bool:
    """Return whether the loss has come down and stays there: scale-free weights may turn fast."""
    return record.history.has_fallen and not lost_progress(record)


def _most(record: Record, limits: Limits) -> Iterable[Finding]:
    """Yield one finding when at least half of all parameters, and of the matrices, have one."""
    median, limit = metric(record, "monitor/update_ratio_median"), limits["ratio"]
    c = record.params.columns
    matrices = c["update_ratio"][(c["ndim"] >= limits["min_ndim"]) & (c["requires_grad"] > 0)]
    matrices = matrices[np.isfinite(matrices)]
    if median is not None and matrices.size:
        # A bias that crosses zero has any ratio; of two values the median would be half of it.
        median = min(median, median_of(matrices))
    if median is not None and median > (1 - MARGIN) * limit:
        yield Finding(
            key="median",
            group="median",
            message=f"one step changed half of the parameters by {median:.1e} of their norm or "
            f"more, more than {limit:.0e}",
            advice=(lower_lr(record), "lengthen the warmup", tighten_clipping(record)),
            severity="info" if _learns(record) else None,
            measured=median,
            threshold=limit,
            fading=median <= limit,
        )


def check_low(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find parameters with a tiny update ratio that are not frozen.

    Of a run that has converged all updates are tiny: then it has to be far below the others'.
    """
    c = record.params.columns
    ratio, limit = c["update_ratio"], limits["ratio"]
    with np.errstate(invalid="ignore"):
        near = (ratio < (1 + MARGIN) * limit) & (ratio > 0)
        near &= (
            (c["ndim"] >= limits["min_ndim"])
            & ~record.params.frozen()
            & (c["requires_grad"] > 0)
            & ~(c["lr"] < limits["decayed"] * (record.history.lr_peak or 0.0))
        )
        if record.history.has_fallen:
            moving = ratio[(ratio > 0) & (c["ndim"] >= limits["min_ndim"])]
            near &= ratio < limits["others"] * (median_of(moving) if moving.size else 0.0)
    rows = np.flatnonzero(near)
    for i in rows[np.argsort(ratio[rows], kind="stable")]:
        name = record.params.names[i]
        higher = raise_lr(record, of=f"the group of {name}", lr=float(c["lr"][i]))
        yield Finding(
            key=name,
            message="",
            params=(name,),
            advice=_advice_low(record, higher),
            measured=float(ratio[i]),
            threshold=limit,
            fading=not ratio[i] < limit,
        )


def _advice_low(record: Record, higher: str) -> tuple[str, ...]:
    """Return the advice, with clipping first where it leaves hardly anything of the gradients."""
    _, clipping, *others = _ADVICE_LOW
    if before_clipping(record) > _HARDLY_LEFT:
        return clipping, higher, *others
    return higher, clipping, *others


def _combine_messages(findings: Sequence[Finding], than: str) -> str:
    worst = findings[0]
    if worst.message:
        return worst.message
    others = f"; also {name_some([f.key for f in findings[1:]])}" if len(findings) > 1 else ""
    return (
        f"one step changed {worst.key} by {worst.measured:.1e} of its norm, "
        f"{than} {worst.threshold:.0e}{others}"
    )


def check_phase(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the median update ratio with the usual range at this step."""
    phase = lr_phase(record, memory)
    ratio = metric(record, "monitor/update_ratio_median")
    # During warmup and after decay the ratio is below the range on purpose.
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
        message=f"the median update ratio is {ratio:.1e}, {side} the usual range of {low:.0e} to "
        f"{high:.0e} {when}",
        advice=(f"{change}, if the loss falls slowly or is unstable", *_ADVICE_PHASE[1:]),
        measured=ratio,
        threshold=limit,
        fading=inside,
    )


_ADVICE_LOW = (
    "raise the learning rate of its group",
    "check that clipping far below the gradient norm does not shrink its gradient",
    "check the weight decay and the initial scale: a large weight has a small update ratio",
)
_ADVICE_PHASE = (
    "halve (double) the learning rate, if the loss falls slowly or is unstable",
    "small models and large batches train well above the range: change nothing if the loss is fine",
)

RULES = (
    Rule(
        name="update_ratio_high",
        summary="update_ratio > ratio for `patience` observations; up to step `after_step` the "
        "median over all parameters",
        check=check_high,
        combine_messages=lambda findings: _combine_messages(findings, "more than"),
        severity="warning",
        patience=2,
        needs=("params",),
        thresholds={
            "ratio": Threshold(0.2, "largest healthy update ratio"),
            "after_step": Threshold(100, "until then, only the median: weights may start at zero"),
            "min_ndim": Threshold(2, "parameters with fewer dimensions are not evaluated"),
        },
        advice=(
            "halve the learning rate, or that of this parameter's group",
            "lengthen the warmup",
            "tighten gradient clipping",
        ),
    ),
    Rule(
        name="update_ratio_low",
        summary="0 < update_ratio < ratio for `patience` observations while the lr has not decayed",
        check=check_low,
        combine_messages=lambda findings: _combine_messages(findings, "less than"),
        severity="warning",
        patience=3,
        needs=("params",),
        thresholds={
            "ratio": Threshold(1e-7, "smallest healthy update ratio"),
            "decayed": Threshold(1e-3, "share of the highest lr below which it explains the ratio"),
            "others": Threshold(1e-3, "of the median of the others, once the loss has fallen"),
            "min_ndim": Threshold(2, "parameters with fewer dimensions are not evaluated"),
        },
        advice=_ADVICE_LOW,
    ),
    Rule(
        name="update_ratio_phase",
        enabled=False,
        summary="median update ratio outside 1e-3..1e-2 before step 1k, 1e-4..1e-3 before 10k, "
        "1e-5..1e-4 after; not during warmup or after the lr has decayed",
        check=check_phase,
        severity="info",
        patience=5,
        cooldown=50,
        needs=("monitor/update_ratio_median",),
        thresholds={
            "after_step": Threshold(200, "earlier steps are not evaluated"),
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

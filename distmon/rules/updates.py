"""Updates that are too large or too small for their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distmon.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some


def check_high(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Parameters that one step changes by more than a tenth."""
    c = record.params.columns
    # Biases and gains may live near zero for good, and a step changes them by much of that.
    judged = c["ndim"] >= limits["min_ndim"]
    if record.step <= limits["after_step"]:
        return  # weights that start at zero double every step at first
    with np.errstate(invalid="ignore"):
        over = np.flatnonzero((c["update_ratio"] > limits["ratio"]) & judged)
    for i in over[np.argsort(-c["update_ratio"][over], kind="stable")]:
        yield _finding(record, int(i), limits)


def check_low(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Parameters that move, but next to nothing."""
    c = record.params.columns
    with np.errstate(invalid="ignore"):
        under = (c["update_ratio"] < limits["ratio"]) & (c["update_ratio"] > 0)
        under &= (c["frozen"] == 0) & (c["requires_grad"] > 0) & ~(c["lr"] < limits["min_lr"])
    order = np.flatnonzero(under)
    for i in order[np.argsort(c["update_ratio"][order], kind="stable")]:
        yield _finding(record, int(i), limits)


def _finding(record: Record, i: int, limits: Limits) -> Finding:
    ratio = float(record.params.columns["update_ratio"][i])
    name = record.params.names[i]
    return Finding(key=name, message="", params=(name,), measured=ratio, threshold=limits["ratio"])


def _tell(findings: Sequence[Finding], than: str) -> str:
    worst = findings[0]
    others = f"; also {name_some([f.key for f in findings[1:]])}" if len(findings) > 1 else ""
    return (
        f"one step changed {worst.key} by {worst.measured:.1e} of its norm, "
        f"{than} {worst.threshold:.0e}{others}"
    )


RULES = (
    Rule(
        name="update_ratio_high",
        summary="update_ratio > ratio for `patience` observations, after step `after_step`",
        check=check_high,
        tell=lambda findings: _tell(findings, "more than"),
        severity="warning",
        patience=2,
        thresholds={
            "ratio": Threshold(0.1, "largest healthy update ratio"),
            "after_step": Threshold(100, "weights that start at zero are not judged before"),
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
        thresholds={
            "ratio": Threshold(1e-7, "smallest healthy update ratio"),
            "min_lr": Threshold(1e-7, "a smaller learning rate explains it"),
        },
        advice=(
            "raise the learning rate of its group",
            "check that its gradient is not scaled away (clipping far below the gradient norm)",
            "check the weight decay and the initial scale: a large weight hides its updates",
        ),
    ),
)

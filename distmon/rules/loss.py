"""Sudden jumps of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, pstdev

from distmon.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """The worst jump among the steps since the last record, against average and spread."""
    window: list[float] = memory.setdefault("window", [])
    ema: float | None = memory.get("ema")
    worst: Finding | None = None
    for step, loss in record.losses.items():
        if not math.isfinite(loss):
            continue
        finding = _judge(step, loss, ema, window, limits)
        if finding and (worst is None or (finding.measured or 0) > (worst.measured or 0)):
            worst = finding
        window.append(loss)
        del window[: -int(limits["window"])]
        ema = record.loss_ema.get(step, ema)
    memory["ema"] = ema
    if worst:
        yield worst


def _judge(
    step: int, loss: float, ema: float | None, window: list[float], limits: Limits
) -> Finding | None:
    if ema is not None and ema > 0 and loss > limits["warning_factor"] * ema:
        critical = loss > limits["critical_factor"] * ema
        factor = limits["critical_factor"] if critical else limits["warning_factor"]
        return Finding(
            key="spike",
            message=f"the loss jumped to {loss:.4g} at step {step}, {loss / ema:.1f}x its moving "
            f"average {ema:.4g} (limit {factor:g}x)",
            severity="critical" if critical else None,
            measured=loss / ema,
            threshold=factor,
        )
    if len(window) < limits["armed_after"]:
        return None
    mean, spread = fmean(window), pstdev(window)
    rise = loss - mean
    if rise > limits["sigmas"] * spread and rise > limits["min_rise"] * abs(mean):
        sigmas = rise / spread if spread else math.inf
        return Finding(
            key="spike",
            message=f"the loss jumped to {loss:.4g} at step {step}, {sigmas:.1f} standard "
            f"deviations above its mean {mean:.4g} of the last {len(window)} steps "
            f"(limit {limits['sigmas']:g})",
            measured=loss / mean if mean > 0 else sigmas,
            threshold=limits["sigmas"],
        )
    return None


RULES = (
    Rule(
        name="loss_spike",
        summary="loss > 10x (critical 100x) its moving average, or 6 sigma over 128 steps",
        check=check,
        severity="warning",
        thresholds={
            "warning_factor": Threshold(10, "times the moving average: warning"),
            "critical_factor": Threshold(100, "times the moving average: critical"),
            "sigmas": Threshold(6, "standard deviations above the recent mean"),
            "window": Threshold(128, "steps of the recent mean"),
            "armed_after": Threshold(64, "steps before the statistical test counts"),
            "min_rise": Threshold(0.1, "relative rise below which the statistical test is silent"),
        },
        advice=(
            "look at the batch of that step: corrupt text, wrong labels, an outlier length",
            "tighten gradient clipping so that one batch cannot move the weights far",
            "if it does not come back within some hundred steps, resume from before it and skip "
            "the batch",
        ),
    ),
)

"""Gradient gain: a gradient that grows from block to block in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, number, tighten_clipping
from distmon.rules.base import (
    MARGIN,
    Finding,
    Limits,
    Memory,
    Rule,
    Threshold,
    metric,
    name_some,
)

MEAN_GAIN = "gradient_monitor/mean_gain"
DAMPING, AMPLIFYING = 0.5, 2.0
"""The message lists blocks whose gain is outside this range."""
FEWEST = 2
"""Minimum number of blocks for a mean."""
_SHOWN = 3


def _mean(record: Record) -> float | None:
    """Return the mean over inner blocks, or the logged mean for logs without blocks."""
    if record.gradient_gain is None:
        return metric(record, MEAN_GAIN)
    gains = record.gradient_gain.inner_gains
    # The gain of a single block varies during training; it matters because depth multiplies it.
    return float(np.mean([*gains.values()])) if len(gains) >= FEWEST else None


def _limit(record: Record, limits: Limits) -> float:
    if limits["scale_by_depth"] and record.gradient_gain:
        return 1 + 0.05 * math.sqrt(len(record.gradient_gain.blocks))
    return limits["limit"]


def check_absolute(
    record: Record,
    limits: Limits,
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """Find a mean gain that amplifies the gradient many times from the last block to the first."""
    mean, limit = _mean(record), _limit(record, limits)
    # The margin is relative to 1, where the gradient neither grows nor shrinks.
    if mean is None or mean <= limit - MARGIN * (limit - 1):
        return
    yield Finding(
        key="mean",
        message=f"the mean gradient gain is {mean:.3f} per block, above {limit:.3g}"
        f"{_describe_blocks(record)}",
        layers=tuple(_largest(record)),
        advice=(lower_lr(record), tighten_clipping(record), *_ADVICE[2:]),
        measured=mean,
        threshold=limit,
        fading=mean <= limit,
    )


def check_drift(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a mean gain that rises, before `gain_absolute` fires.

    Either it is more than `rise` above its value `window` observations ago, `confirmed` times in a
    row; or it has risen at each of three or more observations (at most two windows), by more than
    `min_rise` in total, and would pass `limit` if it kept rising for half as long.
    """
    mean = _mean(record)
    if mean is None:
        return
    window = max(1, int(limits["window"]))
    past = [*memory.get("means", []), mean][-2 * window - 1 :]
    memory["means"] = past
    limit = _limit(record, limits)
    then = past[-window - 1] if len(past) > window else mean
    rise = mean / then - 1 if then > 0 else 0.0
    over = rise > limits["rise"] and mean > limits["min_gain"]
    memory["over"] = memory.get("over", 0) + 1 if over else 0
    message = ""
    if memory["over"] >= limits["confirmed"]:
        measured, threshold = rise, limits["rise"]
        message = (
            f"the mean gradient gain is {mean:.3f} per block, {rise:.0%} more than {window} "
            f"observations ago (limit {limits['rise']:.0%})"
        )
    else:
        began = _start_of_rise(past)
        ahead = mean * math.sqrt(mean / began) if began > 0 else mean
        risen = mean / began - 1 if began > 0 else 0.0
        if mean <= limit < ahead and risen > limits["min_rise"]:
            measured, threshold = ahead, limit
            message = (
                f"the mean gradient gain rose from {began:.3f} to {mean:.3f} per block; if it "
                f"keeps rising it will soon be {ahead:.3f}, above {limit:.3g}"
            )
    if message:
        yield Finding(
            key="drift",
            message=f"{message}{_describe_blocks(record)}",
            layers=tuple(_largest(record)),
            advice=(lower_lr(record), tighten_clipping(record), *_ADVICE[2:]),
            measured=measured,
            threshold=threshold,
        )


def _start_of_rise(past: list[float]) -> float:
    """Return the value at which the current rise began; the last value without a rise of three."""
    at = len(past) - 1
    while at > 0 and past[at - 1] < past[at]:
        at -= 1
    return past[at] if at <= len(past) - 3 else past[-1]


def _largest(record: Record) -> list[str]:
    """Return the inner blocks with the largest gains above 1."""
    gains = record.gradient_gain.inner_gains if record.gradient_gain else {}
    order = sorted(gains, key=lambda block: -gains[block])
    return [block for block in order if gains[block] > 1][:_SHOWN]


def _describe_blocks(record: Record) -> str:
    """Return `; largest in blocks.3 (1.51), blocks.2 (1.44)`, and the blocks outside the range."""
    if not record.gradient_gain:
        return ""
    gains = record.gradient_gain.inner_gains
    shown = ", ".join(f"{block} ({gains[block]:.2f})" for block in _largest(record))
    text = f"; largest in {shown}" if shown else ""
    for word, outside in (
        ("amplifying", [b for b, gain in gains.items() if gain > AMPLIFYING]),
        ("damping", [b for b, gain in gains.items() if gain < DAMPING]),
    ):
        if outside:
            limit = AMPLIFYING if word == "amplifying" else DAMPING
            sign = ">" if word == "amplifying" else "<"
            text += f"; {word} ({sign} {number(limit)}): {name_some(outside)}"
    return text


_ADVICE = (
    "halve the learning rate",
    "tighten gradient clipping from 1.0 to 0.7",
    "lengthen the warmup: the gain grows fastest while the learning rate rises",
    "if it recurs, check the normalization and the initial scale of the named blocks",
)
_LIMITS = {
    "limit": Threshold(1.3, "largest healthy mean gain"),
    "scale_by_depth": Threshold(0, "1: the limit is 1 + 0.05 * sqrt(blocks) instead"),
}

RULES = (
    Rule(
        name="gain_absolute",
        summary="mean gradient gain > limit for `patience` observations",
        check=check_absolute,
        severity="warning",
        patience=3,
        needs=("gradient_gain", MEAN_GAIN),
        thresholds=_LIMITS,
        advice=_ADVICE,
    ),
    Rule(
        name="gain_drift",
        summary="mean gradient gain up > rise over its window, confirmed; or rising so fast that "
        "it will pass limit",
        check=check_drift,
        severity="warning",
        needs=("gradient_gain", MEAN_GAIN),
        thresholds={
            "rise": Threshold(0.1, "relative rise over the window"),
            "window": Threshold(5, "observations over which the rise is measured"),
            "confirmed": Threshold(3, "observations in a row with such a rise"),
            "min_gain": Threshold(1.0, "a smaller gain is not checked: the gradient shrinks"),
            "min_rise": Threshold(0.05, "minimum rise from which the gain is extrapolated"),
            **_LIMITS,
        },
        advice=_ADVICE,
    ),
)

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
from distmon.rules.second_sign import second_sign

MEAN_GAIN = "gradient_monitor/mean_gain"
DAMPING, AMPLIFYING = 0.5, 2.0
"""The message lists blocks whose gain is outside this range."""
_SHOWN = 3


def _mean(record: Record, limits: Limits) -> float | None:
    """Return the mean over inner blocks, or the logged mean for logs without blocks.

    None for a stack of few blocks, whose gain depth cannot multiply, and for one with BatchNorm,
    which couples the examples of a batch: a gain of 3 is usual there.
    """
    if record.gradient_gain is None:
        return metric(record, MEAN_GAIN)
    gains = record.gradient_gain.inner_gains
    norms = record.ranks.get("batchnorm_layers")
    if norms is not None and np.nansum(norms) > 0:
        return None
    return float(np.mean([*gains.values()])) if len(gains) >= limits["min_blocks"] else None


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
    mean, limit = _mean(record, limits), _limit(record, limits)
    # The margin is relative to 1, where the gradient neither grows nor shrinks.
    if mean is None or mean <= limit - MARGIN * (limit - 1):
        return
    sign = second_sign(record)
    yield Finding(
        key="mean",
        message=f"the mean gradient gain is {mean:.3f} per block, above {limit:.3g}"
        f"{_describe_blocks(record)}{f'; {sign}' if sign else ''}",
        severity="warning" if sign else "info",
        layers=tuple(_largest(record)),
        advice=(lower_lr(record), tighten_clipping(record), *_ADVICE[2:]) if sign else _ALONE,
        measured=mean,
        threshold=limit,
        fading=mean <= limit,
    )


def check_drift(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a mean gain that is more than `rise` above its value `window` observations ago.

    `confirmed` times in a row. Alone it is an info; a second sign makes it a warning.
    """
    mean = _mean(record, limits)
    if mean is None:
        return
    window = max(1, int(limits["window"]))
    past = [*memory.get("means", []), mean][-2 * window - 1 :]
    memory["means"] = past
    then = past[-window - 1] if len(past) > window else mean
    rise = mean / then - 1 if then > 0 else 0.0
    over = rise > limits["rise"] and mean > limits["min_gain"]
    memory["over"] = memory.get("over", 0) + 1 if over else 0
    if memory["over"] < limits["confirmed"]:
        return
    sign = second_sign(record)
    if not sign and rise <= limits["alone"]:
        return
    yield Finding(
        key="drift",
        message=f"the mean gradient gain is {mean:.3f} per block, {rise:.0%} more than {window} "
        f"observations ago (limit {limits['rise']:.0%}){_describe_blocks(record)}"
        f"{f'; {sign}' if sign else ''}",
        severity="warning" if sign else "info",
        layers=tuple(_largest(record)),
        advice=(lower_lr(record), tighten_clipping(record), *_ADVICE[2:]) if sign else _ALONE,
        measured=rise,
        threshold=limits["rise"],
    )


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


_ALONE = ("nothing else is unusual: watch the gradient norm and the loss",)
_ADVICE = (
    "halve the learning rate",
    "tighten gradient clipping from 1.0 to 0.7",
    "lengthen the warmup: the gain grows fastest while the learning rate rises",
    "if it recurs, check the normalization and the initial scale of the named blocks",
)
_LIMITS = {
    "limit": Threshold(math.inf, "largest healthy mean gain; 1.3 in the preset `absolute`"),
    "scale_by_depth": Threshold(0, "1: the limit is 1 + 0.05 * sqrt(blocks) instead"),
}
_BLOCKS = {"min_blocks": Threshold(6, "inner blocks: depth multiplies the gain of many blocks")}

RULES = (
    Rule(
        name="gain_absolute",
        summary="mean gradient gain > limit for `patience` observations; alone an info",
        check=check_absolute,
        severity="warning",
        patience=3,
        needs=("gradient_gain", MEAN_GAIN),
        thresholds={**_LIMITS, **_BLOCKS},
        advice=_ADVICE,
    ),
    Rule(
        name="gain_drift",
        summary="mean gradient gain up > rise over its window, confirmed, with a second sign; "
        "alone an info when up > alone",
        check=check_drift,
        severity="warning",
        needs=("gradient_gain", MEAN_GAIN),
        thresholds={
            "rise": Threshold(0.1, "relative rise over the window"),
            "alone": Threshold(0.5, "relative rise that is an info without a second sign"),
            "window": Threshold(5, "observations over which the rise is measured"),
            "confirmed": Threshold(3, "observations in a row with such a rise"),
            "min_gain": Threshold(1.0, "a smaller gain is not checked: the gradient shrinks"),
            **_BLOCKS,
        },
        advice=_ADVICE,
    ),
)

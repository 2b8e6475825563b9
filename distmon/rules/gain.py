"""Gain of the backward pass: the gradient that grows from block to block on its way back."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from distmon.record import Record
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
"""A block outside of these is named."""
FEWEST = 2
"""Blocks that a mean is taken of."""
_SHOWN = 3


def _mean(record: Record) -> float | None:
    """Over the blocks that are judged; of a log without them, the mean that it has."""
    if record.flow is None:
        return metric(record, MEAN_GAIN)
    gains = record.flow.inner_gains
    # The gain of one block alone goes up and down with what it learns; depth is what multiplies it.
    return float(np.mean([*gains.values()])) if len(gains) >= FEWEST else None


def _limit(record: Record, limits: Limits) -> float:
    if limits["scale_by_depth"] and record.flow:
        return 1 + 0.05 * math.sqrt(len(record.flow.blocks))
    return limits["limit"]


def check_absolute(
    record: Record,
    limits: Limits,
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """A mean gain that makes the first block's gradient many times that of the last."""
    mean, limit = _mean(record), _limit(record, limits)
    # The margin counts from 1, where the gradient neither grows nor shrinks.
    if mean is None or mean <= limit - MARGIN * (limit - 1):
        return
    yield Finding(
        key="mean",
        message=f"the gradient grows by {mean:.3f} from block to block on its way back, above "
        f"{limit:.3g}{_tell_blocks(record)}",
        layers=tuple(_largest(record)),
        advice=(lower_lr(record), tighten_clipping(record), *_ADVICE[2:]),
        measured=mean,
        threshold=limit,
        fading=mean <= limit,
    )


def check_drift(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """A mean gain on its way up, told before it is where `gain_absolute` fires.

    Either it is more than `rise` above its value `window` observations ago, `confirmed` times in a
    row; or it has risen at every observation for three or more (of two windows at most), by
    `min_rise` in all, and would pass `limit` if it rose on for half as long.
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
            f"the mean gain of the backward pass is {mean:.3f}, {rise:.0%} more than {window} "
            f"observations ago (limit {limits['rise']:.0%})"
        )
    else:
        began = _start_of_rise(past)
        ahead = mean * math.sqrt(mean / began) if began > 0 else mean
        risen = mean / began - 1 if began > 0 else 0.0
        if mean <= limit < ahead and risen > limits["min_rise"]:
            measured, threshold = ahead, limit
            message = (
                f"the mean gain of the backward pass has risen from {began:.3f} to {mean:.3f} and "
                f"will soon be {ahead:.3f}, above {limit:.3g}, if it goes on"
            )
    if message:
        yield Finding(
            key="drift",
            message=f"{message}{_tell_blocks(record)}",
            layers=tuple(_largest(record)),
            advice=(lower_lr(record), tighten_clipping(record), *_ADVICE[2:]),
            measured=measured,
            threshold=threshold,
        )


def _start_of_rise(past: list[float]) -> float:
    """The value from which every one is higher than the one before; the last without three."""
    at = len(past) - 1
    while at > 0 and past[at - 1] < past[at]:
        at -= 1
    return past[at] if at <= len(past) - 3 else past[-1]


def _largest(record: Record) -> list[str]:
    """The judged blocks with the largest gains, when they are above 1."""
    gains = record.flow.inner_gains if record.flow else {}
    order = sorted(gains, key=lambda block: -gains[block])
    return [block for block in order if gains[block] > 1][:_SHOWN]


def _tell_blocks(record: Record) -> str:
    """`; largest in blocks.3 (1.51), blocks.2 (1.44)`, and those that stand out."""
    if not record.flow:
        return ""
    gains = record.flow.inner_gains
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
    "if it returns, look at the normalisation and the initial scale of the named blocks",
)
_LIMITS = {
    "limit": Threshold(1.3, "largest healthy mean gain"),
    "scale_by_depth": Threshold(0, "1: the limit is 1 + 0.05 * sqrt(blocks) instead"),
}

RULES = (
    Rule(
        name="gain_absolute",
        summary="mean gain of the backward pass > limit for `patience` observations",
        check=check_absolute,
        severity="warning",
        patience=3,
        needs=("flow", MEAN_GAIN),
        thresholds=_LIMITS,
        advice=_ADVICE,
    ),
    Rule(
        name="gain_drift",
        summary="mean gain up > rise over its window, confirmed; or rising so fast that it will "
        "pass limit",
        check=check_drift,
        severity="warning",
        needs=("flow", MEAN_GAIN),
        thresholds={
            "rise": Threshold(0.1, "relative rise over the window"),
            "window": Threshold(5, "observations that the rise is measured over"),
            "confirmed": Threshold(3, "observations in a row with such a rise"),
            "min_gain": Threshold(1.0, "below, the gradient does not grow and may do as it likes"),
            "min_rise": Threshold(0.05, "rise at every observation that is looked ahead from"),
            **_LIMITS,
        },
        advice=_ADVICE,
    ),
)

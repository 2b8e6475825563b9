"""Advice that contains the run's own numbers: which setting to change, from and to which value."""

from __future__ import annotations

import math

from distmon.record.record import Record
from distmon.rules.base import metric

TIGHTER = 0.7
"""Factor by which a clipping norm is tightened; 1.0 becomes 0.7."""
_USUAL_CLIP = 1.0
_LARGE_RATIO = 0.02
"""Median update ratio of a run whose learning rate is high: healthy runs fall below it soon."""
_GREW = 3.0
"""Times its median: a gradient norm that has grown."""


def number(value: float) -> str:
    """Format with two digits as in a config file: 3e-3, 1.5e-3, 0.7, 1.0, 250."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(float(f"{value:.1e}"))))
    if -2 <= exponent < 4:
        text = f"{value:.{max(0, 1 - exponent)}f}"
        return text[:3] + text[3:].rstrip("0") if "." in text else text
    mantissa = f"{value / 10.0**exponent:.1f}".removesuffix(".0")
    return f"{mantissa}e{exponent}"


def lower_lr(record: Record, *, of: str = "", lr: float | None = None) -> str:
    """Advise to halve the learning rate; `of` names a param group and `lr` is its value."""
    return _change_lr(record, "halve", 0.5, of, lr)


def raise_lr(record: Record, *, of: str = "", lr: float | None = None) -> str:
    """Advise to double the learning rate; arguments as in `lower_lr`."""
    return _change_lr(record, "double", 2.0, of, lr)


def _change_lr(record: Record, verb: str, factor: float, of: str, lr: float | None) -> str:
    now = metric(record, "train/lr") if lr is None else lr
    text = f"{verb} the learning rate" + (f" of {of}" if of else "")
    if now is None or not math.isfinite(now) or now <= 0:
        return text
    return f"{text} from {number(now)} to {number(factor * now)}"


def applied_norm(record: Record) -> tuple[float | None, float]:
    """Return the norm of the gradients that the optimizer applied, and its standard error."""
    # Records of 0.1 have it under the name that the reported norm has now.
    for tag in ("monitor/applied_grad_norm", "monitor/grad_norm"):
        norm = metric(record, tag)
        if norm is not None:
            return norm, metric(record, f"{tag}_stderr") or 0.0
    return None, 0.0


def clip_in_force(record: Record) -> float | None:
    """Return the norm that gradients were clipped to at this step; None when they were not.

    The norm after clipping is estimated from a sample, so it must be lower by more than its error.
    """
    unclipped = metric(record, "train/unclipped_grad_norm")
    applied, error = applied_norm(record)
    if unclipped is None or applied is None:
        return None
    return applied if unclipped > 1.1 * (applied + 2 * error) else None


def before_clipping(record: Record) -> float:
    """Return the factor from the clipped to the unclipped gradient norm; 1 without clipping."""
    clip = clip_in_force(record)
    return record.metrics["train/unclipped_grad_norm"] / clip if clip else 1.0


def tighten_clipping(record: Record) -> str:
    """Advise to clip at 0.7 of the current clipping norm, or to start clipping."""
    clip = clip_in_force(record)
    if clip:
        return f"tighten gradient clipping from {number(clip)} to {number(TIGHTER * clip)}"
    usual = record.history.norm_high
    if not usual:
        return f"clip gradients at {number(_USUAL_CLIP)}, or tighten the clip by a third"
    return f"clip gradients at {number(usual)}, which nine of ten observations stayed below"


def ranked_causes(record: Record) -> tuple[str, ...]:
    """Return what can make a loss rise, the likelier first, each with what speaks for it."""
    history = record.history
    norm, usual = metric(record, "monitor/grad_norm"), history.norm_median
    grew = norm / usual if norm is not None and usual else 1.0
    lr = metric(record, "train/lr")
    rising = lr is not None and history.lr is not None and lr > 1.01 * history.lr
    ratio = metric(record, "monitor/update_ratio_median") or 0.0
    large = ratio > _LARGE_RATIO
    rate = f"{lower_lr(record)}: it is too high for this model"
    evidence = [
        f"the learning rate rises (from {number(history.lr or 0.0)})" if rising else "",
        f"a step changes half of the parameters by {ratio:.0%} of their norm" if large else "",
    ]
    for_rate = ", ".join(each for each in evidence if each)
    data = "inspect the data since the rise: other labels, another source, a shuffled order"
    if for_rate:
        lines = [f"{rate}; for it speaks that {for_rate}", data]
    else:
        lines = [
            f"{data}; for it speaks that learning rate and update sizes are as before",
            f"if the data is as before, {rate}",
        ]
    if grew > _GREW and metric(record, "train/unclipped_grad_norm") is None:
        lines.append(f"{tighten_clipping(record)}: the gradient norm is {grew:.1f}x its median")
    return (*lines, "resume from a checkpoint before the rise")

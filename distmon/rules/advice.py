"""Advice with the numbers of the run in it: what to set from what to what."""

from __future__ import annotations

import math

from distmon.record import Record
from distmon.rules.base import metric

TIGHTER = 0.7
"""What a clip is multiplied with; 1.0 becomes 0.7."""
_USUAL_CLIP = 1.0


def number(value: float) -> str:
    """Two digits, in the way people write settings: 3e-3, 1.5e-3, 0.7, 1.0, 250."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(float(f"{value:.1e}"))))
    if -2 <= exponent < 4:
        text = f"{value:.{max(0, 1 - exponent)}f}"
        return text[:3] + text[3:].rstrip("0") if "." in text else text
    mantissa = f"{value / 10.0**exponent:.1f}".removesuffix(".0")
    return f"{mantissa}e{exponent}"


def lower_lr(record: Record, *, of: str = "", lr: float | None = None) -> str:
    """Halve it. `of` names whose it is, `lr` is the value when it is not the run's own."""
    return _change_lr(record, "halve", 0.5, of, lr)


def raise_lr(record: Record, *, of: str = "", lr: float | None = None) -> str:
    """Double it."""
    return _change_lr(record, "double", 2.0, of, lr)


def _change_lr(record: Record, verb: str, factor: float, of: str, lr: float | None) -> str:
    now = metric(record, "train/lr") if lr is None else lr
    text = f"{verb} the learning rate" + (f" of {of}" if of else "")
    if now is None or not math.isfinite(now) or now <= 0:
        return text
    return f"{text} from {number(now)} to {number(factor * now)}"


def clip_in_force(record: Record) -> float | None:
    """The norm that gradients were clipped to at this step, None when they were not.

    The applied norm is estimated from a sample, so it has to be lower by more than its error.
    """
    shown = metric(record, "train/unclipped_grad_norm")
    applied = metric(record, "monitor/grad_norm")
    if shown is None or applied is None:
        return None
    error = metric(record, "monitor/grad_norm_stderr") or 0.0
    return applied if shown > 1.1 * (applied + 2 * error) else None


def before_clipping(record: Record) -> float:
    """What the applied gradients were multiplied with by clipping, undone: 1 without clipping."""
    clip = clip_in_force(record)
    return record.metrics["train/unclipped_grad_norm"] / clip if clip else 1.0


def tighten_clipping(record: Record) -> str:
    """From what it is to 0.7 of it; where none was in force, a value to begin with."""
    clip = clip_in_force(record)
    if clip:
        return f"tighten gradient clipping from {number(clip)} to {number(TIGHTER * clip)}"
    norm = metric(record, "train/unclipped_grad_norm") or metric(record, "monitor/grad_norm")
    if not norm:
        return f"clip gradients at {number(_USUAL_CLIP)}, or tighten the clip by a third"
    return f"clip gradients at {number(min(_USUAL_CLIP, TIGHTER * norm))}"

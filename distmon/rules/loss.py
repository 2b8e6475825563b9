"""Loss spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import fsum

from distmon.record.record import Record
from distmon.rules import advice
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric
from distmon.rules.pruning import pruning_explains
from distmon.rules.second_sign import gets_out_of_hand, lost_progress

ADVICE = (
    "inspect the batch of that step: corrupt text, wrong labels, an outlier length",
    "tighten gradient clipping so that one batch cannot change the weights much",
    "if the loss does not recover within some hundred steps, resume from before the spike and skip "
    "the batch",
)
_CLIMB = 4
"""Steps in a row with a higher loss than the one before: one bad batch is not the reason."""

_TAIL_SHARE = 12
"""One in so many losses is of the tail."""
_TAIL_NEEDS = 48
"""Losses without which the tail is not estimated."""
_FELL = 0.1
"""Share of its first value by which a loss has come down."""
_LITTLE = 1.5
"""Times its start: a loss that is a little higher than that of an untrained model."""
_LATEST = 8
"""Steps in which a divergence has grown above the limits."""


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Yield the worst spike among the steps since the last record."""
    size = max(2, int(limits["window"]))
    window: deque[float] = deque(memory.get("window", []), maxlen=size)
    ema: float | None = memory.get("ema")
    worst: Finding | None = None
    start, best = record.history.start, record.history.best
    progress = start - best if start is not None and best is not None else 0.0
    known_rise = limits["known"] * _recovered_rise(record, memory)
    pruned = pruning_explains(record, memory)
    # Before anything is learned a batch that is a little harder costs nothing.
    nothing_learned = start is not None and not record.history.has_fallen
    nothing_learned &= not gets_out_of_hand(record)
    total, squares = fsum(window), fsum(x * x for x in window)
    for step, loss in record.losses.items():
        if not math.isfinite(loss):
            continue
        finding = None
        past = [*window]
        unusual = _is_unusual(loss, past[-int(limits["recent"]) :], ema, progress, limits)
        # Beyond the critical factor no tail is an excuse.
        by_chance = ema is not None and loss <= limits["critical_factor"] * ema
        # Nor is one news that is like those that the run has come down from.
        known = by_chance and best is not None and loss - best <= known_rise
        if unusual and not known and not (by_chance and _chance(loss, past) > limits["chance"]):
            finding = _by_factor(step, loss, ema, limits)
            if (
                finding is None
                and len(window) >= limits["armed_after"]
                and not (nothing_learned and loss < _LITTLE * (start or 0.0))
            ):
                mean = total / len(window)
                std = math.sqrt(max(0.0, squares / len(window) - mean * mean))
                finding = _by_sigmas(step, loss, mean, std, limits)
        if finding and (worst is None or _urgency(finding) > _urgency(worst)):
            worst = finding
        if len(window) == size:
            total, squares = total - window[0], squares - window[0] ** 2
        window.append(loss)
        total, squares = total + loss, squares + loss * loss
        average = record.loss_ema.get(step, math.nan)
        ema = average if math.isfinite(average) else ema
    memory["ema"], memory["window"] = ema, [*window]
    from_start = _from_the_start(record, limits) or _never_recovered(record, limits, memory)
    worst = worst or from_start
    pruned &= worst is not None and worst.severity != "critical"
    if worst and (pruned or record.history.need_not_fall(record)):
        worst = replace(worst, severity="info")
    if worst and worst.key == "start":
        yield replace(worst, advice=(advice.lower_lr(record), "lengthen the warmup"))
    elif worst and _climbs(record):
        yield replace(
            worst,
            message=f"{worst.message}; it rose step by step, so this is not one bad batch",
            advice=(
                f"{advice.lower_lr(record)}: training diverges",
                "if the learning rate is as before, check the sign of the loss and of its "
                "gradients: training may go uphill",
                "resume from a checkpoint before the rise",
            ),
        )
    elif worst:
        yield replace(worst, advice=(ADVICE[0], advice.tighten_clipping(record), *ADVICE[2:]))


def _recovered_rise(record: Record, memory: Memory) -> float:
    """Return the largest rise of a single loss above the best that the run has come down from."""
    if lost_progress(record) == 0.0 and "rise" in memory:
        memory["recovered"] = max(memory.get("recovered", 0.0), memory.pop("rise"))
    known = float(memory.get("recovered", 0.0))
    losses = [loss for loss in record.losses.values() if math.isfinite(loss)]
    if losses and record.history.best is not None:
        memory["rise"] = max(memory.get("rise", 0.0), max(losses) - record.history.best)
    return known


def _climbs(record: Record) -> bool:
    """Return whether the losses up to the highest, or to one that is not finite, rise in a row."""
    losses = [*record.losses.values()]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < len(losses) and not math.isfinite(losses[-1]):
        # Overflow takes few steps.
        return len(finite) > 2 and finite[-1] > finite[-2] > finite[-3]
    top = max(range(len(losses)), key=lambda i: losses[i])
    before = losses[max(0, top - _CLIMB) : top + 1]
    return len(before) > _CLIMB and all(a < b for a, b in pairwise(before))


def _is_unusual(
    loss: float, recent: list[float], ema: float | None, progress: float, limits: Limits
) -> bool:
    """Return whether a loss is above what was seen lately, by a part of the run's progress.

    Where hard batches are usual, another one is no news; and a converged loss, near zero, is
    multiplied by small changes.
    """
    if len(recent) < limits["after"] or ema is None:
        return False
    mean = fsum(recent) / len(recent)
    rise, usual = loss - mean, max(recent) - mean
    if rise <= limits["above"] * usual or rise < limits["progress"] * progress:
        return False
    if min(recent) <= 0:
        return True
    # Losses that differ by a factor from batch to batch are compared as factors.
    logs = sorted(abs(math.log(b / a)) for a, b in pairwise(recent))
    noise = logs[len(logs) // 2] / (0.6745 * math.sqrt(2))
    return math.log(loss / mean) > limits["log_sigmas"] * noise


def _chance(loss: float, past: list[float]) -> float:
    """Return how likely it is that one more batch than these is as far out as `loss`.

    The largest losses say how heavy the tail is (Hill's estimate of its exponent): where batches
    hold outliers, the next one may be several times the largest so far. The last steps are left
    out, since a run that diverges has a tail of its own making.
    """
    earlier = past[:-_LATEST]
    if len(earlier) < _TAIL_NEEDS:
        return 0.0
    mean = fsum(earlier) / len(earlier)
    rises = sorted((each - mean for each in earlier if each > mean), reverse=True)
    largest, count = rises[: len(earlier) // _TAIL_SHARE], len(earlier) // _TAIL_SHARE
    if len(rises) <= count or not loss - mean > largest[0]:
        return 0.0
    exponent = fsum(math.log(each / rises[count]) for each in largest) / count
    return math.exp(-math.log((loss - mean) / largest[0]) / exponent) if exponent > 0 else 0.0


def _from_the_start(record: Record, limits: Limits) -> Finding | None:
    """Return the finding of a loss that the first steps raise, with updates that are large.

    Such a run often comes down again to what the data gives without its inputs, and stays there.
    """
    losses = [loss for loss in record.losses.values() if math.isfinite(loss)]
    ratio = metric(record, "monitor/update_ratio_median") or 0.0
    if record.history.records or len(losses) < limits["after"]:
        return None
    first, later = losses[0], statistics.median(losses[1:])
    rise = (later - first) / abs(first) if first else 0.0
    # Half of the steps above many times the first loss are no heavy tail, however small the updates
    # look beside the weights that they have made.
    many = limits["critical_factor"]
    if record.step <= len(record.losses) and 0 < many * first < later:
        return Finding(
            key="start",
            message=f"the first {len(losses)} steps raised the loss from {first:.4g} to "
            f"{later:.4g} (limit {many:g}x): the learning rate is too high",
            measured=later / first,
            threshold=many,
        )
    if ratio <= limits["large_update"]:
        return None
    # Where one of them is below the first, batches may differ by as much as the rise.
    if rise <= limits["first_rise"] or min(losses[1:]) <= first:
        return None
    return Finding(
        key="start",
        message=f"the first {len(losses)} steps raised the loss from {first:.4g} to {later:.4g}, "
        f"and a step changes half of the parameters by {ratio:.1%} of their norm (limits "
        f"{limits['first_rise']:.0%} and {limits['large_update']:.0%}): the learning rate is too "
        "high",
        measured=rise,
        threshold=limits["first_rise"],
    )


def _never_recovered(record: Record, limits: Limits, memory: Memory) -> Finding | None:
    """Return the finding of first steps that multiply the loss, which never gets below its start.

    Weights that are too large then leave dead units and updates that look small. A loss with heavy
    tails is multiplied, too, but again and again, and it falls.
    """
    losses = {step: loss for step, loss in record.losses.items() if math.isfinite(loss)}
    if not losses:
        return None
    if not record.history.records:
        first, *later = losses.values()
        peak = max(later, default=first)
        if record.step > len(record.losses) or peak <= limits["warning_factor"] * max(first, 0.0):
            return None
        at = max(losses, key=lambda step: losses[step])
        memory["burst"] = [at, first, peak]
    elif "burst" in memory:
        at, first, peak = memory["burst"]
        falls = statistics.median(losses.values()) < (1 - _FELL) * first
        if falls or peak <= limits["warning_factor"] * max(losses.values()):
            del memory["burst"]
    if "burst" not in memory or not (record.history.records >= 2 or _dead_matrices(record)):
        return None
    if record.history.records > 2:
        del memory["burst"]
    return Finding(
        key="start",
        message=f"the loss jumped from {first:.4g} to {peak:.4g} at step {at:.0f} (limit "
        f"{limits['warning_factor']:g}x), and has not come below its start since: the first "
        "updates were so large that they destroyed the initial weights; the learning rate is too "
        "high",
        measured=peak / first if first else math.inf,
        threshold=limits["warning_factor"],
    )


def _dead_matrices(record: Record) -> bool:
    """Return whether a trained matrix has a gradient of exact zeros."""
    c = record.params.columns
    trained = (c["ndim"] >= 2) & (c["requires_grad"] > 0) & (c["has_grad"] > 0)
    return bool((trained & (c["grad_zero_fraction"] == 1)).any())


def _urgency(finding: Finding) -> tuple[bool, float]:
    return finding.severity == "critical", finding.measured or 0.0


def _by_factor(step: int, loss: float, ema: float | None, limits: Limits) -> Finding | None:
    if ema is None or ema <= 0 or loss <= limits["warning_factor"] * ema:
        return None
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


def _by_sigmas(step: int, loss: float, mean: float, std: float, limits: Limits) -> Finding | None:
    rise = loss - mean
    if rise <= limits["sigmas"] * std or rise <= limits["min_rise"] * abs(mean):
        return None
    sigmas = rise / std if std else math.inf
    return Finding(
        key="spike",
        message=f"the loss jumped to {loss:.4g} at step {step}, {sigmas:.1f} standard deviations "
        f"above its recent mean {mean:.4g} (limit {limits['sigmas']:g})",
        measured=sigmas,
        threshold=limits["sigmas"],
    )


RULES = (
    Rule(
        name="loss_spike",
        summary="loss > 10x (critical 100x) its moving average, or 6 sigma over 128 steps, or "
        "raised by the first steps with large updates",
        check=check,
        severity="warning",
        thresholds={
            "warning_factor": Threshold(10, "times the moving average: warning"),
            "critical_factor": Threshold(100, "times the moving average: critical"),
            "sigmas": Threshold(6, "standard deviations above the recent mean"),
            "window": Threshold(128, "steps of the recent mean"),
            "armed_after": Threshold(64, "steps before the statistical test starts"),
            "recent": Threshold(64, "steps whose largest loss is usual"),
            "known": Threshold(1.5, "times the largest rise that the run has recovered from"),
            "above": Threshold(2, "times the largest rise over the mean of these steps"),
            "chance": Threshold(0.05, "of such a batch, by the tail of the losses in the window"),
            "log_sigmas": Threshold(4, "standard deviations of the logarithm above the mean"),
            "after": Threshold(5, "steps before any test starts"),
            "progress": Threshold(0.2, "minimum rise as a share of the progress since the start"),
            "first_rise": Threshold(0.15, "relative rise in the steps of the first observation"),
            "large_update": Threshold(0.03, "median update ratio that goes with such a rise"),
            "min_rise": Threshold(0.1, "minimum relative rise for the statistical test"),
        },
        advice=ADVICE,
    ),
)

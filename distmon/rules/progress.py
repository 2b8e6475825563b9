"""Training that runs without learning: a flat loss, one that no weight changes, the wrong sign."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import Record
from distmon.rules.advice import before_clipping
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric
from distmon.rules.layer_stacks import fingerprint
from distmon.rules.lr_schedule import lr_phase
from distmon.rules.second_sign import NOISE

NORM = "monitor/grad_norm"
_POINTS = 48
"""Median losses that are kept of a run, evenly spaced."""
_LEVELS_OFF = 0.5
"""Times the rise before it: a climb that slows down by more levels off."""
_LATE = 200
"""First step above which a run was resumed without its state: its start is not known."""


def check_flat(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a loss that stays where it began although the weights have moved a long way.

    Labels that do not belong to the inputs look like that, and so does a task with a long plateau
    or of which little can be known: an info.
    """
    moved, whole = _path(record, memory), _began_here(record, memory)
    history, phase = record.history, lr_phase(record, memory)
    start = history.start
    if start is None or not whole or history.need_not_fall(record):
        return
    settled = phase not in ("rising", "off") and len(history.losses) >= limits["steps"]
    if not settled or moved < limits["path"]:
        return
    recent = statistics.fmean([*history.losses][-int(limits["steps"]) :])
    fall = (start - recent) / abs(start) if start else 0.0
    if abs(fall) < limits["fall"] and not history.has_fallen and not history.falls:
        yield Finding(
            key="flat",
            message=f"the loss is {recent:.4g} and began at {start:.4g}, but the weights have "
            f"moved by {moved:.1f}x their norm since: nothing has been learned that the loss shows",
            measured=fall,
            threshold=limits["fall"],
            once=True,
        )


def check_insensitive(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a loss that no matrix can change: gradient norm x weight norm / loss of all is tiny."""
    history, start = record.history, record.history.start
    phase, whole = lr_phase(record, memory), _began_here(record, memory)
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    if start is None or not losses or not whole or phase in ("ending", "off"):
        return
    now = statistics.median(losses)
    if history.need_not_fall(record) or history.negative or now < (1 - limits["fall"]) * start:
        return
    c = record.params.columns
    with np.errstate(invalid="ignore"):
        learns = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0) & (c["ndim"] >= 2)
        product = c["grad_norm"] * c["weight_norm"] * before_clipping(record)
    young = _grow_from_nothing(record, memory, limits["grown"]) & learns
    known = product[learns & np.isfinite(product)]
    scale = max(abs(now), abs(start))
    if not known.size or young.any():
        return
    largest = float(known.max())
    if scale == 0 and largest > 0:
        return
    measured = largest / scale if scale else 0.0
    # From a saddle a run moves away, ever faster.
    least = memory["least"] = min(measured, memory.get("least", measured))
    leaves = 0 < limits["leaves"] * least < measured
    if measured < limits["product"] and not leaves and len(history.losses) >= limits["steps"]:
        yield Finding(
            key="insensitive",
            message=f"gradient norm x weight norm is at most {measured:.1e} of the loss in every "
            f"matrix (limit {limits['product']:g}), and the loss stays at {now:.4g}: no weight "
            "changes it",
            measured=measured,
            threshold=limits["product"],
        )


def check_sign(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a loss that climbs ever on, or was never above zero and falls without bound, faster.

    What is meant to be minimized slows down: it comes near its lowest value, and its gradients
    shrink. A loss above zero that is maximized by mistake does neither.
    """
    yield from _uphill(record, limits)
    yield from _crossed(record, limits, memory)
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    norm = metric(record, NORM)
    if not losses:
        return
    memory["above"] = bool(memory.get("above")) or max(losses) >= 0
    points = [*memory.get("points", []), [record.step, statistics.median(losses)]]
    memory["points"] = points[::2] if len(points) > _POINTS else points
    norms = memory.setdefault("norms", [])
    if norm is not None and len(norms) < limits["observations"]:
        norms.append(norm)
    start = record.history.start
    if memory["above"] or start is None or norm is None or record.history.need_not_fall(record):
        return
    now = points[-1][1]
    if len(points) < limits["observations"] or now > limits["times"] * start:
        return
    pace = _pace(points)
    if pace > limits["pace"] and norm > limits["norm"] * statistics.median(norms):
        yield Finding(
            key="sign",
            message=f"the loss was never above zero and falls without bound, from {start:.4g} to "
            f"{now:.4g}, {pace:.1f}x as fast as at first, with a growing gradient: it may have the "
            "wrong sign",
            measured=pace,
            threshold=limits["pace"],
        )


def _crossed(record: Record, limits: Limits, memory: Memory) -> Iterator[Finding]:
    """Find a loss that was above zero, and now falls below it, faster than it ever did.

    A likelihood may pass zero, slower and slower. What falls from `start` to below its negative at
    a pace that the run has never had, with large gradients, is a loss that is now maximized.
    """
    history, norm = record.history, metric(record, NORM)
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    start, usual, middles = history.start, history.norm_median, [*history.middles]
    if not losses or start is None or norm is None or not usual or start <= 0:
        return
    if max(losses) >= 0:
        memory["since"] = 0
        memory["over"] = memory.get("over", 0) + 1 if min(losses) >= 0 else 0
        return
    memory["since"] = memory.get("since", 0) + 1
    now, since = statistics.median(losses), int(memory["since"])
    if memory.get("over", 0) < limits["observations"] or since >= len(middles) or now > -start:
        return
    falls = [before - after for before, after in pairwise([*middles, now])]
    fastest = max(falls[: -since - 1], default=0.0)
    recent = falls[-1]
    if recent > limits["pace"] * max(fastest, 0.0) and norm > limits["norm"] * usual:
        yield Finding(
            key="crossed",
            message=f"the loss was above zero, fell below it and is {now:.4g}; it falls by "
            f"{recent:.3g} from one observation to the next, {recent / max(fastest, 1e-30):.1f}x "
            f"as fast as ever before, with a gradient norm of {norm / usual:.1f}x its median: its "
            "sign has changed",
            advice=_ADVICE_UPHILL,
            measured=recent / max(fastest, 1e-30),
            threshold=limits["pace"],
        )


def _uphill(record: Record, limits: Limits) -> Iterator[Finding]:
    """Find a loss that climbs above its start, ever on, at a rate that let it fall before.

    Bad data raises a loss at once, and then it falls or stays. A term that is ramped up raises it
    gradually, with gradients of the usual size. A rate that is too high makes large updates.
    """
    history, lr = record.history, metric(record, "train/lr")
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    norm, usual, start = metric(record, NORM), history.norm_median, history.start
    if not losses or norm is None or not usual or start is None or history.need_not_fall(record):
        return
    ratio = metric(record, "monitor/update_ratio_median") or 0.0
    faster = lr is not None and history.lr is not None and lr > 1.01 * history.lr
    if faster or ratio > limits["large_update"] or norm < limits["grew"] * usual:
        return
    climb = [*history.middles, statistics.median(losses)][-int(limits["climbs"]) - 1 :]
    # Gradients in proportion to the loss are those of a loss whose unit grows.
    if norm / usual < limits["faster"] * climb[-1] / start:
        return
    rises = [after - before for before, after in pairwise(climb)]
    if len(rises) < limits["climbs"] or min(rises) <= 0 or climb[-1] <= start:
        return
    # What levels off is no climb; and the rise has to be above the noise.
    goes_on = all(after > _LEVELS_OFF * before for before, after in pairwise(rises))
    if goes_on and climb[-1] - climb[0] > NOISE * history.noise:
        yield Finding(
            key="uphill",
            message=f"the loss climbs ever on, in the last {len(climb)} observations from "
            f"{climb[0]:.4g} to {climb[-1]:.4g}, above its start {start:.4g}, with a gradient norm "
            f"of {norm / usual:.1f}x its median at a learning rate and updates as before: training "
            "may go uphill, with the wrong sign",
            advice=_ADVICE_UPHILL,
            measured=norm / usual,
            threshold=limits["grew"],
        )


def _path(record: Record, memory: Memory) -> float:
    """Return the length of the way that the matrices have gone, in units of their norm."""
    c = record.params.columns
    with np.errstate(invalid="ignore"):
        trained = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0) & (c["ndim"] >= 2)
        ratio = c["update_ratio"][trained & np.isfinite(c["update_ratio"])]
    steps = max(0, record.step - memory.get("step", 0))
    memory["step"] = record.step
    memory["path"] = memory.get("path", 0.0) + steps * (
        float(np.median(ratio)) if ratio.size else 0
    )
    return float(memory["path"])


def _grow_from_nothing(record: Record, memory: Memory, grown: float) -> NDArray[np.bool_]:
    """Return the rows whose norm is a multiple of the first one, as of an adapter or a new head.

    Such weights begin at or near zero: that their product with the gradient is small says nothing.
    """
    names, norms = fingerprint(record.params.names), record.params.columns["weight_norm"]
    norms = np.where(np.isfinite(norms), norms, 0.0)
    if memory.get("names") != names:
        memory["names"], memory["norms"] = names, norms.tolist()
    return np.asarray((norms > grown * np.array(memory["norms"])) | (norms == 0.0))


def _began_here(record: Record, memory: Memory) -> bool:
    """Return whether the run was observed from its start."""
    if "first" not in memory:
        memory["first"] = record.step if not record.history.records else 0
    return bool(memory["first"] <= _LATE)


def _pace(points: list[list[float]]) -> float:
    """Return how much the loss falls per step in the last third, over that in the first third."""
    third = len(points) // 3
    first, last = points[: third + 1], points[-third - 1 :]
    rates = [
        (part[0][1] - part[-1][1]) / max(1.0, part[-1][0] - part[0][0]) for part in (first, last)
    ]
    return rates[1] / rates[0] if rates[0] > 0 else 0.0


_ADVICE_UPHILL = (
    "check the sign of what backward gets and of the gradients that the optimizer steps: a minus, "
    "maximize=True, a reversal layer, a scaler with a negative scale",
    "if the sign is right, resume from a checkpoint before the climb with half the learning rate",
)

RULES = (
    Rule(
        name="wrong_sign",
        summary="a loss that was never above zero is `times` its start, and falls `pace` times as "
        "fast as at first with a gradient norm above `norm` times that of the first observations; "
        "or the loss climbs above its start in `climbs` observations in a row",
        check=check_sign,
        severity="warning",
        patience=2,
        cooldown=30,
        needs=(NORM,),
        thresholds={
            "times": Threshold(5.0, "times its start"),
            "pace": Threshold(1.7, "times the fall per step in the first third of the run"),
            "norm": Threshold(2.0, "times the gradient norm of the first observations"),
            "observations": Threshold(9, "before it is evaluated, and whose norm is the first"),
            "climbs": Threshold(3, "observations in a row, each above the one before, of a climb"),
            "grew": Threshold(3.0, "times the median gradient norm in a climb"),
            "faster": Threshold(1.5, "times the growth of the loss over its start, for gradients"),
            "large_update": Threshold(0.05, "median update ratio of a rate that is too high"),
        },
        advice=(
            "check the sign of the loss: a likelihood or a reward is maximized by its negative, a "
            "loss by itself",
            "check the sign of each term: one that is subtracted has no lower bound",
            "if the loss is meant to fall for ever, set loss: {expected_to_fall: false}",
        ),
    ),
    Rule(
        name="loss_insensitive",
        summary="gradient norm x weight norm of every matrix < product times the loss, which has "
        "not fallen",
        check=check_insensitive,
        severity="warning",
        patience=3,
        cooldown=30,
        needs=(NORM,),
        thresholds={
            "product": Threshold(0.01, "of the loss, in every matrix"),
            "fall": Threshold(0.1, "share of its start by which a loss has fallen"),
            "grown": Threshold(1.5, "times its first norm: a matrix that grows from nothing"),
            "leaves": Threshold(2.0, "times its lowest value: the run leaves a saddle"),
            "steps": Threshold(10, "whose losses are known"),
        },
        advice=(
            "look for dead or saturated units: biases far below zero, inputs of the wrong scale, "
            "an initialization at zero",
            "check the end of the model: softmax or sigmoid applied twice, a clamp, an argmax, a "
            "detach before the loss",
            "check that inputs differ from each other and are not all zero",
        ),
    ),
    Rule(
        name="loss_flat",
        summary="loss within `fall` of its start and not falling, after the weights have moved by "
        "`path` times their norm",
        check=check_flat,
        severity="info",
        patience=5,
        cooldown=100,
        needs=("train/step_loss_ema",),
        thresholds={
            "fall": Threshold(0.1, "share of its start"),
            "path": Threshold(1.0, "sum of the median update ratios of all steps"),
            "steps": Threshold(64, "whose mean is compared with the start"),
        },
        advice=(
            "check that labels belong to their inputs: overfit one batch of 8 examples; if that "
            "works, look at the order in which data and labels are shuffled",
            "check the end of the model: softmax applied twice, a loss over the wrong dimension",
            "if the task is hard or the signal faint, go on: this is an info",
        ),
    ),
)

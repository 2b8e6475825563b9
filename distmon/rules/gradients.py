"""The gradient norm of the whole model: too high, too low, decaying."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from math import inf, isfinite

import numpy as np

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, ranked_causes
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, metric
from distmon.rules.lr_schedule import lr_phase
from distmon.rules.pruning import pruning_explains
from distmon.rules.second_sign import LOST, loss_growth, lost_progress

NORMS = ("train/unclipped_grad_norm", "monitor/grad_norm")
"""The norm before clipping where the trainer reports it, else the estimate after clipping."""


def _norm(record: Record) -> float | None:
    return next((norm for tag in NORMS if (norm := metric(record, tag)) is not None), None)


def check_high(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a gradient norm that is far above its own median, or above an absolute limit.

    Also gradients that are too large from the start: |gradient| x |weight| / loss of a matrix is
    the relative change of the loss when the matrix changes by its own size.
    """
    yield from _sensitive(record, limits, memory)
    norm, usual = _norm(record), record.history.norm_median
    pruned = pruning_explains(record, memory)
    if norm is None:
        return
    highest = max([*record.history.norms][:-1], default=inf)
    # Of a converged run the norm is small and varies by large factors. A gradient that grows as
    # its loss does is no finding of its own: what raised the loss is.
    grew = loss_growth(record)
    ratio = norm / usual / grew if usual and norm > highest else 0.0
    worst = max(ratio / limits["ratio"], norm / limits["warning"])
    if worst <= 1 - MARGIN:
        memory["above"] = 0
        return
    above = ratio > limits["ratio"]
    memory["above"] = memory.get("above", 0) + 1 if above else 0
    # One batch alone may do that; and the gradients of a saddle point grow while the loss falls.
    rises = (lost_progress(record) or 0.0) > LOST
    falls = record.history.falls and record.history.has_fallen
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    best = record.history.best
    at_best = bool(losses) and best is not None and statistics.median(losses) < best
    alone = pruned or (above and not rises and (memory["above"] < 2 or falls))
    critical = (ratio > limits["critical_ratio"] and not alone) or norm > limits["critical"]
    against = f"{norm / usual:.0f}x its median {usual:.3g}" if usual and above else "too large"
    if above and grew > 1:
        against += f", while the loss is {grew:.1f}x its own"
    yield Finding(
        key="high",
        message=f"the gradient norm is {norm:.4g}, {against}",
        severity="critical"
        if critical
        else "info"
        if alone and norm <= limits["warning"]
        else None,
        advice=ranked_causes(record),
        measured=ratio if ratio > limits["ratio"] else norm,
        threshold=limits["ratio"] if ratio > limits["ratio"] else limits["warning"],
        # Gradients that grow while the loss is lower than ever leave a plateau.
        fading=worst <= 1 or (alone and at_best and norm <= limits["warning"]),
    )


def _sensitive(record: Record, limits: Limits, memory: Memory) -> Iterator[Finding]:
    c, start = record.params.columns, record.history.start
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    if not len(record.params) or not losses or record.history.negative or min(losses) < 0:
        return
    # A loss near zero says nothing about its scale; the loss at the start does.
    scale = max(statistics.median(losses), abs(start or 0.0))
    with np.errstate(invalid="ignore"):
        # Of an embedding only the rows with a gradient count.
        live = np.sqrt(np.clip(1 - c["grad_zero_fraction"], 0.0, 1.0))
        product = c["grad_norm"] * c["weight_norm"] * live
        # What no optimizer steps is not clipped, and its gradient may be a sum of many steps.
        stepped = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0)
        product = np.where(stepped & np.isfinite(product), product, 0.0)
    row = int(product.argmax())
    measured = float(product[row]) / scale if scale > 0 else 0.0
    memory["sensitive"] = memory.get("sensitive", 0) + 1 if measured > limits["sensitive"] else 0
    if memory["sensitive"] >= limits["confirmed"]:
        name = record.params.names[row]
        # A loss that comes down all the same has another unit than its gradients suggest.
        learns = record.history.has_fallen and not (lost_progress(record) or 0.0) > LOST
        yield Finding(
            key="sensitive",
            message=f"gradient norm x weight norm of {name} is {measured:.0f}x the loss (limit "
            f"{limits['sensitive']:g}): a small change of it changes the loss many times",
            params=(name,),
            severity="info" if learns else None,
            advice=(lower_lr(record), *_ADVICE_SENSITIVE),
            measured=measured,
            threshold=limits["sensitive"],
        )


def check_low(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find a gradient norm that is too small to train."""
    norm = _norm(record)
    if norm is None or norm >= (1 + MARGIN) * limits["norm"]:
        return
    if metric(record, NORMS[0]) is None:
        # An estimate: the sample may have missed the few embedding rows that have a gradient.
        error = metric(record, "monitor/grad_norm_stderr") or 0.0
        if norm == 0 or norm + 2 * error >= limits["norm"]:
            return
    yield Finding(
        key="low",
        message=f"the gradient norm is {norm:.2e}, below {limits['norm']:g}",
        measured=norm,
        threshold=limits["norm"],
        fading=norm >= limits["norm"],
    )


def check_decay(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the norm with its median after the first steps and the warmup.

    The first values are not used: those of a language model are several times higher than all
    later ones in a healthy run.
    """
    norm, phase = _norm(record), lr_phase(record, memory)
    if norm is None or record.step < limits["after_step"]:
        return
    start = memory.get("start")
    if start is None:
        if phase != "rising":
            first = [*memory.get("first", []), norm]
            if len(first) < limits["baseline"]:
                memory["first"] = first
            else:
                memory.pop("first", None)
                memory["start"] = statistics.median(first)
        return
    limit = min(limits["factor"] * start, limits["below"])
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    best, began = record.history.best, record.history.start
    if not losses or best is None or began is None:
        return
    # A gradient that shrinks with the loss is that of a run which converges.
    if statistics.median(losses) < began - limits["progress"] * abs(began):
        return
    if norm < (1 + MARGIN) * limit:
        yield Finding(
            key="decay",
            message=f"the gradient norm fell to {norm:.2e}, {norm / start:.2f} of its "
            f"{start:.2e} after the start of the run (limit {limits['factor']:g}), but the loss "
            "is where it was",
            measured=norm,
            threshold=limit,
            fading=norm >= limit,
        )


_ADVICE_SENSITIVE = (
    "check the scale at which this matrix starts, and the normalization before it",
    "check that gradients are cleared in every step and that the norm is clipped",
)
_ADVICE_HIGH = (
    "halve the learning rate",
    "clip gradients, or tighten the clip",
    "inspect the batch of that step and the layer with the largest gradient norm",
)

RULES = (
    Rule(
        name="grad_norm_high",
        summary="gradient norm (before clipping, where reported) > ratio times its median over the "
        "last 32 observations; an info once, and while the loss falls",
        check=check_high,
        severity="warning",
        needs=NORMS,
        thresholds={
            "ratio": Threshold(30, "times its median: warning"),
            "critical_ratio": Threshold(1000, "times its median: critical"),
            "sensitive": Threshold(20, "gradient norm x weight norm of a matrix over the loss"),
            "confirmed": Threshold(2, "observations in a row with such a product"),
            "warning": Threshold(inf, "norm above which it is a warning; 100 in `absolute`"),
            "critical": Threshold(inf, "norm above which it is critical; 1000 in `absolute`"),
        },
        advice=_ADVICE_HIGH,
    ),
    Rule(
        name="grad_norm_low",
        enabled=False,
        summary="gradient norm < norm for `patience` observations",
        check=check_low,
        severity="warning",
        patience=3,
        needs=NORMS,
        thresholds={"norm": Threshold(1e-3, "smallest healthy norm")},
        advice=(
            "check the scale of the loss (a mean taken twice, a loss weight near 0)",
            "look for saturated activations or a layer that blocks the gradient",
            "if the loss is low enough, the run has converged: stop it",
        ),
    ),
    Rule(
        name="grad_norm_decay",
        summary="gradient norm < factor of its median over the first observations after warmup",
        check=check_decay,
        severity="info",
        patience=5,
        cooldown=50,
        needs=NORMS,
        thresholds={
            "factor": Threshold(0.1, "share of its baseline"),
            "below": Threshold(inf, "a larger norm is healthy; 0.3 in `absolute`"),
            "progress": Threshold(0.1, "relative fall of the loss that explains it"),
            "baseline": Threshold(10, "observations whose median is the baseline"),
            "after_step": Threshold(100, "earlier steps are ignored: their norm is always higher"),
        },
        advice=(
            "if the loss still falls, nothing is wrong",
            "if it does not, check grad_imbalance and the layers without a gradient",
            "check that nothing scales the loss down over time (a loss weight, a schedule)",
        ),
    ),
)

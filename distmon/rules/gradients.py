"""Gradient norms: of the whole model, and of each layer compared with the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from math import inf, isfinite

import numpy as np

from distmon.record.record import Column, Record
from distmon.rules.advice import before_clipping, lower_lr, ranked_causes, tighten_clipping
from distmon.rules.base import (
    MARGIN,
    Finding,
    Limits,
    Memory,
    Rule,
    Threshold,
    layer_of,
    metric,
    name_some,
)
from distmon.rules.frozen import resting_parameters
from distmon.rules.layer_stacks import Rows, fingerprint, roles_of_one_size
from distmon.rules.lr_schedule import lr_phase
from distmon.rules.second_sign import LOST, lost_progress

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
    if norm is None:
        return
    highest = max([*record.history.norms][:-1], default=inf)
    # Of a converged run the norm is small and varies by large factors.
    ratio = norm / usual if usual and norm > highest else 0.0
    worst = max(ratio / limits["ratio"], norm / limits["warning"])
    if worst <= 1 - MARGIN:
        memory["above"] = 0
        return
    above = ratio > limits["ratio"]
    memory["above"] = memory.get("above", 0) + 1 if above else 0
    # One batch alone may do that; and the gradients of a saddle point grow while the loss falls.
    rises = (lost_progress(record) or 0.0) > LOST
    falls = record.history.falls and record.history.has_fallen
    alone = above and not rises and (memory["above"] < 2 or falls)
    critical = (ratio > limits["critical_ratio"] and not alone) or norm > limits["critical"]
    against = f"{ratio:.0f}x its median {usual:.3g}" if ratio > limits["ratio"] else "too large"
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
        fading=worst <= 1,
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


def check_imbalance(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find dead, vanishing and exploding gradients among matrices of the same role and size."""
    if not record.params:
        return
    c = record.params.columns
    with np.errstate(invalid="ignore"):
        norms = c["grad_norm"] * before_clipping(record)
        learns = (c["requires_grad"] > 0) & (c["has_grad"] > 0) & np.isfinite(norms)
    resting = resting_parameters(record.params, memory, limits["gaps"])
    yield from _died(record, np.where(resting, np.nan, norms), memory)
    learns &= ~resting
    vanishing: dict[str, Finding] = {}
    for role, rows in roles_of_one_size(record.params, 2):
        known = rows[learns[rows]]
        if len(known) < 2 or not norms[known].max() > 0:
            continue
        yield from _dead(record, known, norms, limits)
        alive = known[norms[known] > limits["dead"] * norms[known].max()]
        if len(alive) >= limits["min_layers"]:
            for found in _vanishing(record, role, alive, norms, limits):
                vanishing.setdefault(found.key, found)
    yield from vanishing.values()
    for name, norm in zip(record.params.names, norms, strict=True):
        if norm > limits["exploding"]:
            yield _exploding(record, name, float(norm), limits)


def _died(record: Record, norms: Column, memory: Memory) -> Iterator[Finding]:
    """Find matrices that had a gradient earlier in the run and have none at all any more."""
    c, names = record.params.columns, record.params.names
    alive = np.isfinite(norms) & (norms > 0)
    before = np.zeros(len(names), dtype=bool)
    if memory.get("table") == fingerprint(names):
        before[memory["alive"]] = True
    memory["table"] = fingerprint(names)
    memory["alive"] = np.flatnonzero(alive | before).tolist()
    zero = (norms == 0) & (c["grad_zero_fraction"] == 1) & (c["ndim"] >= 2)
    for row in np.flatnonzero(zero & before & (c["requires_grad"] > 0)):
        if alive.any():
            yield Finding(
                key=f"dead {names[row]}",
                group="dead",
                message=f"the gradient of {names[row]} is exactly zero, and was not before: no "
                "gradient reaches it",
                params=(names[row],),
                measured=0.0,
                threshold=0.0,
            )


def _dead(record: Record, rows: Rows, norms: Column, limits: Limits) -> Iterator[Finding]:
    """Find matrices that get no gradient although others of their role do.

    Momentum or weight decay still changes such a matrix, so `frozen` does not find it.
    """
    largest = norms[rows].max()
    for row in rows[norms[rows] <= limits["dead"] * largest]:
        name = record.params.names[int(row)]
        share = norms[row] / largest
        yield Finding(
            key=f"dead {name}",
            group="dead",
            message=f"the gradient of {name} is {share:.0e} of that of the same matrix in other "
            "layers: no gradient reaches it",
            params=(name,),
            measured=float(share),
            threshold=limits["dead"],
        )


def _vanishing(
    record: Record, role: str, rows: Rows, norms: Column, limits: Limits
) -> Iterator[Finding]:
    first, last = int(rows[0]), int(rows[-1])
    share = float(norms[first] / norms[last])
    # From layer to layer: a gradient that vanishes does so steadily, one small layer does not.
    steady = float(np.mean(np.diff(np.log(norms[rows])) > 0))
    if share < limits["vanishing"] and steady >= limits["steady"]:
        layers = tuple(layer_of(record.params.names[i]) for i in (first, last))
        yield Finding(
            key=f"vanishing {role.partition('*')[0]}",
            group="vanishing",
            message=f"the gradient vanishes in the backward pass: {record.params.names[first]} has "
            f"norm {norms[first]:.2e}, {share:.2%} of the {norms[last]:.2e} of "
            f"{record.params.names[last]} (limit {limits['vanishing']:.0%})",
            layers=layers,
            severity="info" if record.history.falls and record.history.has_fallen else None,
            measured=share,
            threshold=limits["vanishing"],
        )


def _exploding(record: Record, name: str, norm: float, limits: Limits) -> Finding:
    return Finding(
        key=f"exploding {name}",
        group="exploding",
        message=f"the gradient of {name} has norm {norm:.4g}, above {limits['exploding']:g}: it "
        "explodes there",
        params=(name,),
        advice=(lower_lr(record), tighten_clipping(record), *_ADVICE_HIGH[2:]),
        measured=norm,
        threshold=limits["exploding"],
    )


def _combine_layer_messages(findings: Sequence[Finding]) -> str:
    others = name_some([name for f in findings[1:] for name in (*f.layers, *f.params)])
    return findings[0].message + (f"; also {others}" if others else "")


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
    Rule(
        name="grad_imbalance",
        summary="the same matrix in the layers of a stack: gradient of the first < vanishing of "
        "the last, one < dead of the largest, or one that became zero",
        check=check_imbalance,
        combine_messages=_combine_layer_messages,
        severity="warning",
        patience=3,
        needs=("monitor/grad_norm",),
        thresholds={
            "vanishing": Threshold(0.01, "smallest healthy norm of the first layer over the last"),
            "steady": Threshold(0.7, "share of layers from which to the next the norm rises"),
            "min_layers": Threshold(4, "layers of one role and size that are compared"),
            "dead": Threshold(1e-6, "of the largest norm of the same role: no gradient reaches it"),
            "gaps": Threshold(3, "times the longest time without a gradient that ended"),
            "exploding": Threshold(inf, "largest healthy norm; 100 in `absolute`"),
        },
        advice=(
            "check the initialization and the normalization of the named layers",
            "add a path around them for the gradient: residual connections, pre-norm blocks",
            "initialize residual branches with a scale of 1 / sqrt(2 x layers)",
        ),
    ),
)

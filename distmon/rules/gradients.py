"""Gradient norms: of the whole model, and of each layer compared with the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from distmon.record.record import Column, Record
from distmon.rules.advice import before_clipping, lower_lr, tighten_clipping
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
from distmon.rules.layer_stacks import Stack, stacks
from distmon.rules.lr_schedule import lr_phase

NORMS = ("train/unclipped_grad_norm", "monitor/grad_norm")
"""The norm before clipping where the trainer reports it, else the estimate after clipping."""


def _norm(record: Record) -> float | None:
    return next((norm for tag in NORMS if (norm := metric(record, tag)) is not None), None)


def check_high(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find a gradient norm that is too large."""
    norm = _norm(record)
    if norm is None or norm <= (1 - MARGIN) * limits["warning"]:
        return
    critical = norm > limits["critical"]
    limit = limits["critical"] if critical else limits["warning"]
    yield Finding(
        key="high",
        message=f"the gradient norm is {norm:.4g}, above {limit:g}",
        severity="critical" if critical else None,
        advice=(lower_lr(record), tighten_clipping(record), *_ADVICE_HIGH[2:]),
        measured=norm,
        threshold=limit,
        fading=norm <= limits["warning"],
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
    if norm < (1 + MARGIN) * limit:
        yield Finding(
            key="decay",
            message=f"the gradient norm fell to {norm:.2e}, {norm / start:.2f} of its "
            f"{start:.2e} after the start of the run (limit {limits['factor']:g} of that, and "
            f"below {limits['below']:g})",
            measured=norm,
            threshold=limit,
            fading=norm >= limit,
        )


def check_imbalance(
    record: Record,
    limits: Limits,
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """Find dead, exploding, vanishing and unequal gradients among the layers of each stack."""
    if not record.params:
        return
    with np.errstate(invalid="ignore"):
        squares = (record.params.columns["grad_norm"] * before_clipping(record)) ** 2
    for stack in stacks(record.params.names):
        norms = _layer_norms(stack, squares)
        yield from _layer_findings(record, stack, norms, limits)
        yield from _dead_parts(record, stack, norms, limits)


def _layer_norms(stack: Stack, squares: Column) -> dict[str, float]:
    """Return the norm by layer, in order of depth, without layers that have no finite norm."""
    norms = {}
    for layer, rows in zip(stack.layers, stack.rows, strict=True):
        measured = squares[rows][np.isfinite(squares[rows])]
        if measured.size:
            norms[layer] = float(np.sqrt(measured.sum()))
    return norms


def _layer_findings(
    record: Record, stack: Stack, norms: dict[str, float], limits: Limits
) -> Iterator[Finding]:
    for layer, norm in sorted(norms.items(), key=lambda item: -item[1]):
        if norm > limits["exploding"]:
            yield Finding(
                key=f"exploding {layer}",
                group="exploding",
                message=f"the gradient of {layer} has norm {norm:.4g}, above "
                f"{limits['exploding']:g}: it explodes there",
                layers=(layer,),
                advice=(lower_lr(record), tighten_clipping(record), *_ADVICE_HIGH[2:]),
                measured=norm,
                threshold=limits["exploding"],
            )
        elif norm < limits["dead"]:
            yield Finding(
                key=f"dead {layer}",
                group="dead",
                message=f"the gradient of {layer} has norm {norm:.1e}, below {limits['dead']:g}: "
                "no gradient reaches this layer",
                layers=(layer,),
                measured=norm,
                threshold=limits["dead"],
            )
    alive = {layer: norm for layer, norm in norms.items() if norm >= limits["dead"]}
    if len(alive) < 2:
        return
    first, last = next(iter(alive)), next(reversed(alive))
    # In healthy language models the first layer, which normalizes the embedding, has about ten
    # times the gradient of the others, so it is compared only in a stack of two layers.
    rest = [*alive][1:] if len(alive) > 2 else [*alive]
    low, high = min(rest, key=lambda at: alive[at]), max(rest, key=lambda at: alive[at])
    share, spread = alive[first] / alive[last], (alive[high] / alive[low]) ** 2
    if share < limits["vanishing"]:
        yield Finding(
            key=f"vanishing {stack.layers[0]}",
            group="vanishing",
            message=f"the gradient vanishes in the backward pass: {first} has norm "
            f"{alive[first]:.2e}, {share:.2%} of the {alive[last]:.2e} of {last} (limit "
            f"{limits['vanishing']:.0%})",
            layers=(first, last),
            measured=share,
            threshold=limits["vanishing"],
        )
    elif spread > limits["spread"]:
        yield Finding(
            key=f"spread {stack.layers[0]}",
            group="spread",
            message=f"the gradient variance differs {spread:.0f}x between layers: {high} has norm "
            f"{alive[high]:.2e}, {low} {alive[low]:.2e} (limit {limits['spread']:g}x)",
            layers=(high, low),
            measured=spread,
            threshold=limits["spread"],
        )


def _dead_parts(
    record: Record, stack: Stack, norms: dict[str, float], limits: Limits
) -> Iterator[Finding]:
    """Find matrices with a zero gradient in a layer that otherwise has one.

    The same matrix must have a gradient in another layer. Momentum or weight decay still changes
    such a matrix, so the `frozen` rule does not find it.
    """
    columns, names = record.params.columns, record.params.names
    for rows in stack.roles.values():
        norm, learns = columns["grad_norm"][rows], columns["requires_grad"][rows] > 0
        still = (norm == 0) & learns & (columns["ndim"][rows] >= 2)
        if still.all():
            continue
        for row in rows[still]:
            name = names[int(row)]
            if norms.get(layer_of(name), 0.0) < limits["dead"]:
                continue  # the whole layer is reported
            yield Finding(
                key=f"dead {name}",
                group="dead",
                message=f"the gradient of {name} is exactly zero, but not in the rest of its layer",
                params=(name,),
                measured=0.0,
                threshold=limits["dead"],
            )


def _combine_layer_messages(findings: Sequence[Finding]) -> str:
    others = name_some([name for f in findings[1:] for name in (*f.layers, *f.params)])
    return findings[0].message + (f"; also {others}" if others else "")


_ADVICE_HIGH = (
    "halve the learning rate",
    "clip gradients, or tighten the clip",
    "inspect the batch of that step and the layer with the largest gradient norm",
)

RULES = (
    Rule(
        name="grad_norm_high",
        summary="gradient norm (before clipping, where reported) > warning, > critical",
        check=check_high,
        severity="warning",
        needs=NORMS,
        thresholds={
            "warning": Threshold(100, "norm above which it is a warning"),
            "critical": Threshold(1000, "norm above which it is critical"),
        },
        advice=_ADVICE_HIGH,
    ),
    Rule(
        name="grad_norm_low",
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
            "below": Threshold(0.3, "a larger norm is healthy whatever the baseline"),
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
        summary="layers of a stack: ratio of gradient variances > spread, first < vanishing of "
        "last, norm > exploding, norm < dead",
        check=check_imbalance,
        combine_messages=_combine_layer_messages,
        severity="warning",
        patience=3,
        needs=("monitor/grad_norm",),
        thresholds={
            "spread": Threshold(100, "largest healthy ratio of squared norms of two layers"),
            "vanishing": Threshold(0.01, "smallest healthy norm of the first layer over the last"),
            "exploding": Threshold(100, "largest healthy norm of a layer"),
            "dead": Threshold(1e-7, "norm below which no gradient reaches a layer"),
        },
        advice=(
            "check the initialization and the normalization of the named layers",
            "add a path around them for the gradient: residual connections, pre-norm blocks",
            "initialize residual branches with a scale of 1 / sqrt(2 x layers)",
        ),
    ),
)

"""The norm of the gradient: of all of it, and of each layer against the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from distmon.record import Column, Record
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
from distmon.rules.depth import Stack, stacks
from distmon.rules.schedule import follow_lr

NORMS = ("train/unclipped_grad_norm", "monitor/grad_norm")
"""The norm before clipping, where the trainer shows it; else the one that was applied."""


def _norm(record: Record) -> float | None:
    return next((norm for tag in NORMS if (norm := metric(record, tag)) is not None), None)


def check_high(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """A gradient that takes the weights somewhere else in one step."""
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
    """A gradient from which nothing is learnt."""
    norm = _norm(record)
    if norm is None or norm >= (1 + MARGIN) * limits["norm"]:
        return
    if metric(record, NORMS[0]) is None:
        # An estimate: a sample may have missed the few rows of an embedding that have a gradient.
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
    """The norm against what it was when the run had found its pace.

    Not against its very first values: those of a language model are several times higher than
    anything later, and it stays healthy while it comes down.
    """
    norm, phase = _norm(record), follow_lr(record, memory)
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
            message=f"the gradient norm has come down to {norm:.2e}, {norm / start:.2f} of the "
            f"{start:.2e} that it had after the start (limit {limits['factor']:g} of it, and "
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
    """The layers of every stack: dead, exploding, vanishing towards the input, far apart."""
    if not record.params:
        return
    with np.errstate(invalid="ignore"):
        squares = (record.params.columns["grad_norm"] * before_clipping(record)) ** 2
    for stack in stacks(record.params.names):
        norms = _layer_norms(stack, squares)
        yield from _judge(record, stack, norms, limits)
        yield from _dead_parts(record, stack, norms, limits)


def _layer_norms(stack: Stack, squares: Column) -> dict[str, float]:
    """By layer, in order of depth; a layer of which nothing finite was measured is left out."""
    norms = {}
    for layer, rows in zip(stack.layers, stack.rows, strict=True):
        measured = squares[rows][np.isfinite(squares[rows])]
        if measured.size:
            norms[layer] = float(np.sqrt(measured.sum()))
    return norms


def _judge(
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
                "nothing reaches this layer",
                layers=(layer,),
                measured=norm,
                threshold=limits["dead"],
            )
    alive = {layer: norm for layer, norm in norms.items() if norm >= limits["dead"]}
    if len(alive) < 2:
        return
    first, last = next(iter(alive)), next(reversed(alive))
    # The first layer normalises the embedding and has about ten times the gradient of the others
    # in healthy language models, so it is compared with them only where there is no other.
    rest = [*alive][1:] if len(alive) > 2 else [*alive]
    low, high = min(rest, key=lambda at: alive[at]), max(rest, key=lambda at: alive[at])
    share, spread = alive[first] / alive[last], (alive[high] / alive[low]) ** 2
    if share < limits["vanishing"]:
        yield Finding(
            key=f"vanishing {stack.layers[0]}",
            group="vanishing",
            message=f"the gradient vanishes on its way back: {first} has {alive[first]:.2e}, "
            f"{share:.2%} of the {alive[last]:.2e} of {last} (limit {limits['vanishing']:.0%})",
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
    """Matrices without any gradient in a layer that has one, while their like elsewhere get it.

    An optimizer with momentum or weight decay goes on moving them, so they are not frozen.
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
                continue  # the whole layer is told of
            yield Finding(
                key=f"dead {name}",
                group="dead",
                message=f"{name} gets a gradient of exact zeros while the rest of its layer learns",
                params=(name,),
                measured=0.0,
                threshold=limits["dead"],
            )


def _tell_layers(findings: Sequence[Finding]) -> str:
    others = name_some([place for f in findings[1:] for place in (*f.layers, *f.params)])
    return findings[0].message + (f"; also {others}" if others else "")


_ADVICE_HIGH = (
    "halve the learning rate",
    "clip gradients, or tighten the clip",
    "look at the batch of that step, and at the layer with the largest gradient norm",
)

RULES = (
    Rule(
        name="grad_norm_high",
        summary="gradient norm (before clipping, when shown) > warning, > critical",
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
            "check that the loss is scaled as meant (a mean taken twice, a loss weight near 0)",
            "look for saturated activations or a layer that blocks the gradient",
            "if the loss is as low as it should be, the run has converged: stop it",
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
            "factor": Threshold(0.1, "share of its starting value"),
            "below": Threshold(0.3, "a norm above is healthy whatever it was before"),
            "baseline": Threshold(10, "observations that the starting value is the median of"),
            "after_step": Threshold(100, "steps before do not count: they are always higher"),
        },
        advice=(
            "if the loss still falls, nothing is wrong",
            "if it does not, look at grad_imbalance and the layers that get no gradient",
            "check that nothing scales the loss down over time (a loss weight, a schedule)",
        ),
    ),
    Rule(
        name="grad_imbalance",
        summary="layers of a stack: gradient variance > spread apart, first < vanishing of last, "
        "norm > exploding, norm < dead",
        check=check_imbalance,
        tell=_tell_layers,
        severity="warning",
        patience=3,
        needs=("monitor/grad_norm",),
        thresholds={
            "spread": Threshold(100, "largest healthy ratio of squared norms of two layers"),
            "vanishing": Threshold(0.01, "smallest healthy norm of the first layer over the last"),
            "exploding": Threshold(100, "largest healthy norm of a layer"),
            "dead": Threshold(1e-7, "norm below which nothing reaches a layer"),
        },
        advice=(
            "check the initialisation and the normalisation of the named layers",
            "give the gradient a way around them: residual connections, pre-norm blocks",
            "scale residual branches by 1 / sqrt(2 x layers) at the start",
        ),
    ),
)

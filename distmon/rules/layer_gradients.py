"""Gradient norms of matrices, compared with those of the same role in other layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

import numpy as np

from distmon.record.record import Column, Record
from distmon.rules.advice import before_clipping, lower_lr, tighten_clipping
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, layer_of, name_some
from distmon.rules.frozen import resting_parameters
from distmon.rules.layer_stacks import Rows, fingerprint, roles_of_one_size


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
        advice=(lower_lr(record), tighten_clipping(record), _ADVICE_EXPLODING),
        measured=norm,
        threshold=limits["exploding"],
    )


def _combine_layer_messages(findings: Sequence[Finding]) -> str:
    others = name_some([name for f in findings[1:] for name in (*f.layers, *f.params)])
    return findings[0].message + (f"; also {others}" if others else "")


_ADVICE_EXPLODING = "inspect the batch of that step and the layer with the largest gradient norm"

RULES = (
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

"""Weights that jump, grow apart, or begin apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from distmon.record import ParamTable, Record
from distmon.rules.advice import lower_lr, tighten_clipping
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.depth import Rows, fingerprint, sizes, stacks

_SAME_SIZE = 1.25
"""Sizes are estimated from norms; those of one role in like layers come out this close."""


def check_spike(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Parameters whose norm is many times what it was at the last observation."""
    table = record.params
    c = table.columns
    norms = c["weight_norm"]
    same_model = memory.get("names") == fingerprint(table.names)
    then = np.array(memory["norms"]) if same_model else np.zeros(len(table))
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.where(then > 0, norms / then, 0.0)
        rms = np.hypot(c["weight_std"], c["weight_mean"])
        # A weight that was next to zero may grow by any factor until it is of an ordinary size.
        jumped = (growth > limits["factor"]) & (rms > limits["factor"] * limits["floor"])
        # What did not learn before may begin to: only a weight that was learning can spike.
        learning = np.isfinite(norms) & (norms > 0) & (c["update_ratio"] > 0)
    unmeasured = np.isnan(c["update_ratio"])
    memory["names"] = fingerprint(table.names)
    memory["norms"] = np.where(learning, norms, np.where(unmeasured, then, 0.0)).tolist()
    rows = np.flatnonzero(jumped & np.isfinite(growth))
    for i in rows[np.argsort(-growth[rows], kind="stable")]:
        name = table.names[i]
        yield Finding(
            key=name,
            message=f"the norm of {name} jumped from {then[i]:.3g} to {norms[i]:.3g}, "
            f"{growth[i]:.0f}x in one observation (limit {limits['factor']:g}x)",
            params=(name,),
            advice=(
                _ADVICE_SPIKE[0],
                lower_lr(record),
                tighten_clipping(record),
            ),
            measured=float(growth[i]),
            threshold=limits["factor"],
        )


def check_divergence(
    record: Record,
    limits: Limits,
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """The same parameter of different layers, with norms far apart."""
    norms = record.params.columns["weight_norm"]
    for role, rows in _roles(record.params, limits["min_ndim"]):
        known = rows[np.isfinite(norms[rows]) & (norms[rows] > 0)]
        if len(known) < 2:
            continue
        low, high = known[np.argmin(norms[known])], known[np.argmax(norms[known])]
        ratio = float(norms[high] / norms[low])
        if ratio > limits["ratio"]:
            names = record.params.names[high], record.params.names[low]
            yield Finding(
                key=role,
                message=f"{names[0]} has norm {norms[high]:.3g} and {names[1]} {norms[low]:.3g}: "
                f"{ratio:.0f}x apart (limit {limits['ratio']:g}x)",
                params=names,
                measured=ratio,
                threshold=limits["ratio"],
            )


def check_init(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """The same parameter of different layers, begun with different variances.

    A variance that changes little from each layer to the next, as one that is scaled with depth,
    is taken as meant: somewhere there has to be a step of more than the root of the ratio.
    """
    first = not memory.get("seen")
    memory["seen"] = True
    if record.step > limits["first_until" if first else "until_step"]:
        return
    std = record.params.columns["weight_std"]
    for role, rows in _roles(record.params, limits["min_ndim"]):
        known = rows[np.isfinite(std[rows]) & (std[rows] > 0)]
        if len(known) < 2:
            continue
        variance = std[known] ** 2
        low, high = int(np.argmin(variance)), int(np.argmax(variance))
        ratio = float(variance[high] / variance[low])
        step = float(np.exp(np.abs(np.diff(np.log(variance))).max()))
        if ratio > limits["ratio"] and step > math.sqrt(limits["ratio"]):
            names = record.params.names[known[high]], record.params.names[known[low]]
            yield Finding(
                key=role,
                message=f"the weights of {names[0]} begin with std {std[known[high]]:.2e} and "
                f"those of {names[1]} with {std[known[low]]:.2e}: variances {ratio:.0f}x apart "
                f"(limit {limits['ratio']:g}x)",
                params=names,
                measured=ratio,
                threshold=limits["ratio"],
            )


def _roles(table: ParamTable, min_ndim: float) -> Iterator[tuple[str, Rows]]:
    """Parameters of one role and one size, in order of depth."""
    size = sizes(table)
    for stack in stacks(table.names):
        for role, rows in stack.roles.items():
            large = rows[table.columns["ndim"][rows] >= min_ndim]
            for i, alike in enumerate(_by_size(large, size)):
                if len(alike) > 1:
                    yield f"{role} {i}" if i else role, alike


def _by_size(rows: Rows, size: NDArray[np.float64]) -> list[Rows]:
    """Layers of a plain sequence may have the same names and other shapes, and so other scales."""
    known = rows[np.isfinite(size[rows]) & (size[rows] > 0)]
    order = np.argsort(size[known], kind="stable")
    larger = np.diff(np.log(size[known][order])) > math.log(_SAME_SIZE)
    return [known[np.sort(part)] for part in np.split(order, np.flatnonzero(larger) + 1)]


def _tell(findings: Sequence[Finding]) -> str:
    others = name_some([f.key for f in findings[1:]])
    return findings[0].message + (f"; also {others}" if others else "")


_ADVICE_SPIKE = (
    "look at what happened there: a bad batch, a loss spike, a weight that was loaded",
    "halve the learning rate",
    "tighten gradient clipping",
)

RULES = (
    Rule(
        name="weight_norm_spike",
        summary="norm of a parameter > factor times what it was at the last observation",
        check=check_spike,
        tell=_tell,
        severity="warning",
        needs=("params",),
        thresholds={
            "factor": Threshold(10, "times its norm at the last observation"),
            "floor": Threshold(1e-3, "root mean square below which a weight counts as this large"),
        },
        advice=_ADVICE_SPIKE,
    ),
    Rule(
        name="weight_divergence",
        summary="norms of the same parameter of two layers > ratio apart",
        check=check_divergence,
        tell=_tell,
        severity="warning",
        patience=2,
        needs=("params",),
        thresholds={
            "ratio": Threshold(1000, "times the smallest norm of the same role"),
            "min_ndim": Threshold(2, "biases and gains, with fewer dimensions, are not judged"),
        },
        advice=(
            "check the weight decay of both: one may decay to nothing, one may not decay at all",
            "check the initialisation of the named layers",
            "look for a layer that gets no gradient, or all of it",
        ),
    ),
    Rule(
        name="bad_init",
        summary="variances of the same matrix of two layers > ratio apart in the first steps",
        check=check_init,
        tell=_tell,
        severity="warning",
        needs=("params",),
        thresholds={
            "ratio": Threshold(10, "times the smallest variance of the same role"),
            "until_step": Threshold(10, "last step whose weights are judged"),
            "first_until": Threshold(200, "last step at which the first observation is judged"),
            "min_ndim": Threshold(2, "biases and gains, with fewer dimensions, are not judged"),
        },
        advice=(
            "initialise the named layers in the same way",
            "look for a module that keeps its default initialisation, or is initialised twice",
            "if the weights come from a checkpoint this is no fault: switch bad_init off",
        ),
    ),
)

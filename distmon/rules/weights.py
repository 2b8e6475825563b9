"""Weight norms that jump, diverge between layers, or start with unequal variances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from distmon.record.record import Record
from distmon.rules.advice import lower_lr, tighten_clipping
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.layer_stacks import fewest_of, fingerprint, roles_of_one_size, sizes


def check_spike(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find parameters whose norm is many times its value at the last observation."""
    table = record.params
    c = table.columns
    norms = c["weight_norm"]
    same_model = memory.get("names") == fingerprint(table.names)
    then = np.array(memory["norms"]) if same_model else np.zeros(len(table))
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.where(then > 0, norms / then, 0.0)
        rms = np.hypot(c["weight_std"], c["weight_mean"])
        # A weight that was near zero may grow by any factor until it has an ordinary size.
        jumped = (growth > limits["factor"]) & (rms > limits["factor"] * limits["floor"])
        # Only a weight that was updated before can spike: others may just have been unfrozen.
        jumped &= c["ndim"] >= limits["min_ndim"]
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
    """Compare the norms of the same parameter in different layers."""
    norms = record.params.columns["weight_norm"]
    for role, rows in roles_of_one_size(record.params, limits["min_ndim"]):
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
                f"ratio {ratio:.0f} (limit {limits['ratio']:g})",
                params=names,
                measured=ratio,
                threshold=limits["ratio"],
            )


def check_init(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the initial variances of the same parameter in different layers.

    A variance that changes little from layer to layer, as one that is scaled with depth, is taken
    as intended: there must be one change by more than the square root of the ratio.
    """
    first = not memory.get("seen")
    memory["seen"] = True
    if record.step > limits["first_until" if first else "until_step"]:
        return
    std = record.params.columns["weight_std"]
    numel = sizes(record.params)
    with np.errstate(invalid="ignore"):
        # What training has made of a weight since, above all of one that began at zero.
        changed = record.params.columns["update_ratio"] * record.step > limits["changed"]
    for role, rows in roles_of_one_size(record.params, limits["min_ndim"]):
        known = rows[np.isfinite(std[rows]) & (std[rows] > 0) & ~changed[rows]]
        if len(known) < fewest_of(role) or numel[known].min() < limits["min_size"]:
            continue  # the variance of few elements is noise
        variance = std[known] ** 2
        low, high = int(np.argmin(variance)), int(np.argmax(variance))
        ratio = float(variance[high] / variance[low])
        step = float(np.exp(np.abs(np.diff(np.log(variance))).max()))
        if ratio > limits["ratio"] and step > math.sqrt(limits["ratio"]):
            names = record.params.names[known[high]], record.params.names[known[low]]
            yield Finding(
                key=role,
                message=f"the weights of {names[0]} start with std {std[known[high]]:.2e} and "
                f"those of {names[1]} with {std[known[low]]:.2e}: ratio of variances {ratio:.0f} "
                f"(limit {limits['ratio']:g})",
                params=names,
                measured=ratio,
                threshold=limits["ratio"],
            )


def _combine_messages(findings: Sequence[Finding]) -> str:
    others = name_some([f.key for f in findings[1:]])
    return findings[0].message + (f"; also {others}" if others else "")


_ADVICE_SPIKE = (
    "check what happened at that step: a bad batch, a loss spike, a loaded checkpoint",
    "halve the learning rate",
    "tighten gradient clipping",
)

RULES = (
    Rule(
        name="weight_norm_spike",
        summary="norm of a parameter > factor times its value at the last observation",
        check=check_spike,
        combine_messages=_combine_messages,
        severity="warning",
        needs=("params",),
        thresholds={
            "factor": Threshold(10, "times its norm at the last observation"),
            "min_ndim": Threshold(2, "parameters with fewer dimensions are not evaluated"),
            "floor": Threshold(1e-3, "root mean square below which a weight counts as this large"),
        },
        advice=_ADVICE_SPIKE,
    ),
    Rule(
        name="weight_divergence",
        summary="ratio of the norms of the same parameter in two layers > ratio",
        check=check_divergence,
        combine_messages=_combine_messages,
        severity="warning",
        patience=2,
        needs=("params",),
        thresholds={
            "ratio": Threshold(1000, "times the smallest norm of the same role"),
            "min_ndim": Threshold(2, "parameters with fewer dimensions are not evaluated"),
        },
        advice=(
            "check the weight decay of both: one may decay to zero, one may not decay at all",
            "check the initialization of the named layers",
            "look for a layer without a gradient, or with a much larger one",
        ),
    ),
    Rule(
        name="bad_init",
        summary="ratio of variances of the same matrix in two layers > ratio in the first steps",
        check=check_init,
        combine_messages=_combine_messages,
        severity="warning",
        needs=("params",),
        thresholds={
            "ratio": Threshold(10, "times the smallest variance of the same role"),
            "until_step": Threshold(10, "last step that is evaluated"),
            "min_size": Threshold(128, "elements: the variance of fewer is noise"),
            "changed": Threshold(1.0, "steps x update ratio of a weight that is no longer initial"),
            "first_until": Threshold(200, "last step at which the first observation is evaluated"),
            "min_ndim": Threshold(2, "parameters with fewer dimensions are not evaluated"),
        },
        advice=(
            "initialize the named layers in the same way",
            "look for a module that keeps its default initialization, or is initialized twice",
            "if the weights come from a checkpoint this is expected: disable bad_init",
        ),
    ),
)

"""Parameters that should be updated but are not, and the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import NO_UPDATE, Column, ParamTable, Record
from distmon.rules.base import (
    Finding,
    Limits,
    Memory,
    Rule,
    Threshold,
    metric,
    name_some,
)
from distmon.rules.idle_modules import idle_modules, name_idle
from distmon.rules.layer_stacks import fingerprint

# Half a unit in the last place is about 2e-3 of a bf16 weight, 2e-4 of fp16 and 3e-8 of fp32.
_COARSE_ROUNDING = 1e-5
_UNMOVED = 1e-7
"""Relative difference of a norm or mean that the order of a sum can make in float64."""
_CONVERGED = 0.01
"""Share of the first gradient norm at which a loss that has fallen counts as converged."""


class _Reason(NamedTuple):
    words: str
    advice: tuple[str, ...]


REASONS: Mapping[str, _Reason] = {
    "requires_grad": _Reason(
        "requires_grad was set to False after the start",
        (
            "find the call of requires_grad_(False) on it during the run",
            "if that is intended, exclude it from the monitor",
        ),
    ),
    "not_in_optimizer": _Reason(
        "no optimizer owns it",
        (
            "pass it to the optimizer, or set requires_grad=False if it should stay constant",
            "build the optimizer after the last change of the model (new head, tied weights, LoRA)",
        ),
    ),
    "not_stepped": _Reason(
        "its optimizer has not stepped",
        (
            "call step() of every optimizer of the model",
            "if this one is meant to start or to stop at another time, ignore this alert",
        ),
    ),
    "no_gradient": _Reason(
        "it gets no gradient",
        (
            "check that its output reaches the loss (detach, no_grad, an unused branch)",
            "look for a hook or a zero_grad that clears it between backward and step",
        ),
    ),
    "zero_gradient": _Reason(
        "its gradient is exactly zero everywhere",
        (
            "look for dead units or a mask that multiplies its output by zero",
            "check its initialization: a layer of zeros between two others gets no gradient",
            "check for gradients that underflow in fp16: raise the loss scale",
        ),
    ),
    "rounding": _Reason(
        "its updates are lost to rounding",
        (
            "in bf16 or fp16 keep fp32 master weights for it, or use stochastic rounding",
            "raise the learning rate: an update below half a unit in the last place is lost",
        ),
    ),
    "ignored": _Reason(
        "it has a gradient, but the optimizer does not change it",
        (
            "check what the optimizer does with it (a wrapper, a closure, a restored copy)",
            "check that the learning rate of its group is the one you set",
        ),
    ),
}


def reason(table: ParamTable, i: int, adaptive: bool = True) -> str:
    """Return why parameter `i` is not updated, as a key of REASONS.

    `adaptive`: the optimizer divides a gradient by its own size, as Adam does.
    """
    c = table.columns
    if c["requires_grad"][i] == 0:
        return "requires_grad"
    if c["in_optimizer"][i] == 0:
        return "not_in_optimizer"
    if c["has_grad"][i] == 0:
        return "no_gradient"
    if c["grad_zero_fraction"][i] == 1:
        return "zero_gradient"
    with np.errstate(invalid="ignore", divide="ignore"):
        coarseness = c["update_lost_bound"][i] / c["weight_norm"][i]
        # Adam changes an element by about the learning rate in each step, SGD by it x gradient.
        step = c["lr"][i] * (1.0 if adaptive else c["grad_norm"][i] / math.sqrt(_elements(c, i)))
        typical = c["update_lost_bound"][i] * c["weight_std"][i] / c["weight_norm"][i]
    if coarseness > _COARSE_ROUNDING or step < typical:
        return "rounding"
    return "ignored"


def _elements(columns: Mapping[str, Column], i: int) -> float:
    """Return the number of elements, estimated as norm ** 2 / mean square."""
    square = columns["weight_std"][i] ** 2 + columns["weight_mean"][i] ** 2
    return float(columns["weight_norm"][i] ** 2 / square) if square > 0 else 1.0


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Yield one finding per frozen parameter, grouped by reason."""
    table = record.params
    c = table.columns
    had_gradient = _had_gradient(table, memory)
    off_since_start = _off_since_start(table, memory)
    resting = resting_parameters(table, memory, limits["gaps"])
    # Who ends a stage, or skips a step, has stepped before.
    unstepped = _unstepped(record) & ~_has_stepped(table, memory)
    still = table.frozen(limits["ratio"]) | unstepped
    moved = _moved(table, memory)
    if _converged(record, still):
        return
    still &= ~moved & ~_negligible(table, limits["negligible"])
    kinds = record.ranks.get("adaptive", np.ones(1))
    idle = idle_modules(table)
    resting_of: dict[str, list[str]] = {}
    rounded: list[str] = []
    switched_off: list[str] = []
    for i in np.flatnonzero(still):
        why = reason(table, int(i), bool((kinds > 0).any()))
        if unstepped[i]:
            why = "not_stepped"
        if resting[i] and why in ("no_gradient", "zero_gradient", "requires_grad"):
            continue
        if why in ("no_gradient", "zero_gradient") and idle[i]:
            resting_of.setdefault(idle[i], []).append(table.names[i])
            continue
        # A module that no loss has ever used, or a copy that is not trained, is often meant so.
        unused = not had_gradient[i] and why != "not_stepped"  # whose gradient is not known
        if why == "requires_grad":
            if not off_since_start[i]:
                switched_off.append(table.names[i])
            continue
        if why == "rounding" and c["ndim"][i] < 2:
            rounded.append(table.names[i])
            continue
        words = REASONS[why].words
        if why == "rounding":
            words += f" ({c['update_lost_fraction'][i]:.0%} of its non-zero gradients)"
        yield Finding(
            key=table.names[i],
            group=f"{why} unused" if unused else why,
            message=words,
            params=(table.names[i],),
            advice=REASONS[why].advice,
            severity="info" if unused else None,
            measured=float(np.nan_to_num(c["update_ratio"][i])),
            threshold=limits["ratio"],
            once=why == "not_stepped",
        )
    yield from name_idle(resting_of, limits, memory)
    # Who sets requires_grad in a run mostly follows a schedule: the first time is news. Norm
    # weights near 1 stand still in bf16, now one and now another; the matrices learn.
    for key, why, names, once in (
        ("requires_grad", "requires_grad", switched_off, True),
        ("rounded vectors", "rounding", rounded, False),
    ):
        if names:
            yield Finding(
                key=key,
                group=key,
                message=REASONS[why].words,
                params=tuple(names),
                advice=REASONS[why].advice,
                severity="info",
                measured=0.0,
                threshold=limits["ratio"],
                once=once,
            )


def _off_since_start(table: ParamTable, memory: Memory) -> NDArray[np.bool_]:
    """Return the parameters without requires_grad in every record: `cannot_learn` names them."""
    c, names = table.columns, fingerprint(table.names)
    off = (c["requires_grad"] == 0) & (c["in_optimizer"] > 0)
    before = memory.get("off")
    if before is not None and memory.get("off_names") == names:
        off &= np.isin(np.arange(len(table)), before)
    memory["off"], memory["off_names"] = np.flatnonzero(off).tolist(), names
    return np.asarray(off)


def _unstepped(record: Record) -> NDArray[np.bool_]:
    """Return the parameters whose optimizer did not take the step that another one took."""
    c = record.params.columns
    measured = np.isfinite(c["update_ratio"])
    if not record.applied or not measured.any():
        return np.zeros(len(record.params), dtype=bool)
    owned = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0) & (c["update_expected"] > 0)
    return np.asarray(~measured & owned & np.isfinite(c["weight_norm"]))


def _has_stepped(table: ParamTable, memory: Memory) -> NDArray[np.bool_]:
    """Return the parameters that an optimizer has stepped at an observation of this run."""
    has, names = np.isfinite(table.columns["update_ratio"]), fingerprint(table.names)
    if memory.get("stepped_names") == names:
        has[memory.get("stepped", [])] = True
    memory["stepped_names"], memory["stepped"] = names, np.flatnonzero(has).tolist()
    return np.asarray(has)


def _had_gradient(table: ParamTable, memory: Memory) -> NDArray[np.bool_]:
    """Return the parameters that have had a gradient other than zero in this run."""
    c, names = table.columns, fingerprint(table.names)
    with np.errstate(invalid="ignore"):
        had = (c["has_grad"] > 0) & ~(c["grad_zero_fraction"] == 1)
    if memory.get("names") == names:
        had[memory.get("had", [])] = True
    memory["had"] = np.flatnonzero(had).tolist()
    return np.asarray(had)


def _moved(table: ParamTable, memory: Memory) -> NDArray[np.bool_]:
    """Return the parameters that differ from the observation before, whatever this step did.

    An optimizer may step now and then (alternating, gradients accumulated inside), and weights may
    be written without one (averages, codebooks). The same elements are read at each observation.
    """
    c, then = table.columns, memory.get("weights")
    now = np.array([c["weight_norm"], c["weight_mean"]])
    memory["weights"] = np.where(np.isfinite(now), now, 0.0).tolist()
    if then is None or np.shape(then) != now.shape:
        return np.zeros(len(table), dtype=bool)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.abs(now - np.array(then)) > _UNMOVED * np.abs(now)).any(axis=0))


def _converged(record: Record, still: NDArray[np.bool_]) -> bool:
    """Return whether nothing moves because an optimizer with a tolerance has come to its end."""
    c, history = record.params.columns, record.history
    trained = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0) & (c["has_grad"] > 0)
    if not trained.any() or not still[trained].all() or not history.has_fallen:
        return False
    norm, first = metric(record, "monitor/grad_norm"), history.first_norm
    return norm is not None and first is not None and norm < _CONVERGED * first


def resting_parameters(table: ParamTable, memory: Memory, gaps: float) -> NDArray[np.bool_]:
    """Return the parameters whose lack of a gradient is no longer than usual in this run.

    Experts without tokens and blocks that are skipped at random get no gradient in some steps. The
    longest such gap that ended, of any parameter, tells what is usual.
    """
    c = table.columns
    with np.errstate(invalid="ignore"):
        without = (c["has_grad"] == 0) | (c["grad_zero_fraction"] == 1)
    before = memory.get("without")
    same = memory.get("names") == fingerprint(table.names)
    count = np.array(before) if same else np.zeros(len(table))
    ended = count[~without]
    longest = max(float(memory.get("gap", 0.0)), float(ended.max(initial=0.0)))
    count = np.where(without, count + 1, 0)
    memory["names"], memory["without"] = fingerprint(table.names), count.tolist()
    memory["gap"] = longest
    return np.asarray(without & (count <= gaps * longest))


def _negligible(table: ParamTable, share: float) -> NDArray[np.bool_]:
    """Return the vectors whose gradient is zero but for rounding, as a bias before BatchNorm."""
    c = table.columns
    with np.errstate(invalid="ignore"):
        known = c["grad_norm"][np.isfinite(c["grad_norm"]) & (c["grad_norm"] > 0)]
        usual = float(np.median(known)) if known.size else 0.0
        return (c["ndim"] < 2) & (c["grad_norm"] > 0) & (c["grad_norm"] < share * usual)


def combine_messages(findings: Sequence[Finding]) -> str:
    """Return one sentence for all parameters that are frozen for the same reason."""
    params = [param for finding in findings for param in finding.params]
    names, first = name_some(params), findings[0]
    subject = (
        f"{names} did not move"
        if len(params) == 1
        else f"{len(params)} parameters did not move: {names}"
    )
    return (
        f"{subject} (update ratio {first.measured:.1e} <= {first.threshold:.0e}): {first.message}"
    )


RULES = (
    Rule(
        name="frozen",
        summary="update_ratio <= ratio for `patience` observations; not while its lr is 0",
        check=check,
        combine_messages=combine_messages,
        severity="warning",
        patience=3,
        needs=("params",),
        thresholds={
            "ratio": Threshold(NO_UPDATE, "largest update ratio of a frozen parameter"),
            "gaps": Threshold(3, "times the longest gap without a gradient that ended"),
            "idle": Threshold(3, "observations without a gradient that name one of many modules"),
            "negligible": Threshold(1e-5, "of the median gradient: that of a vector is rounding"),
        },
        advice=tuple(f"if {why.words}: {why.advice[0]}" for why in REASONS.values()),
    ),
)

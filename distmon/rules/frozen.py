"""Parameters that should be updated but are not, and the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import NO_UPDATE, ParamTable, Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.layer_stacks import fingerprint

# Half a unit in the last place is about 2e-3 of a bf16 weight, 2e-4 of fp16 and 3e-8 of fp32.
_COARSE_ROUNDING = 1e-5


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
            "check for gradients that underflow in fp16: raise the loss scale",
        ),
    ),
    "rounding": _Reason(
        "its updates are lost to rounding",
        (
            "keep fp32 master weights for it, or use stochastic rounding",
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


def reason(table: ParamTable, i: int) -> str:
    """Return why parameter `i` is not updated, as a key of REASONS."""
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
        # Adam changes an element by about the learning rate in each step.
        typical = c["update_lost_bound"][i] * c["weight_std"][i] / c["weight_norm"][i]
    if coarseness > _COARSE_ROUNDING or c["lr"][i] < typical:
        return "rounding"
    return "ignored"


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Yield one finding per frozen parameter, grouped by reason."""
    table = record.params
    c = table.columns
    resting = _resting(table, memory, limits["gaps"])
    negligible = _negligible(table, limits["negligible"])
    rounded: list[str] = []
    for i in np.flatnonzero(table.frozen(limits["ratio"]) & ~negligible):
        why = reason(table, int(i))
        if resting[i] and why in ("no_gradient", "zero_gradient"):
            continue
        if why == "rounding" and c["ndim"][i] < 2:
            rounded.append(table.names[i])
            continue
        words = REASONS[why].words
        if why == "rounding":
            words += f" ({c['update_lost_fraction'][i]:.0%} of its non-zero gradients)"
        yield Finding(
            key=table.names[i],
            group=why,
            message=words,
            params=(table.names[i],),
            advice=REASONS[why].advice,
            measured=float(c["update_ratio"][i]),
            threshold=limits["ratio"],
        )
    if rounded:
        # Norm weights near 1 stand still in bf16, now one and now another; the matrices learn.
        yield Finding(
            key="rounded vectors",
            group="rounded vectors",
            message=REASONS["rounding"].words,
            params=tuple(rounded),
            advice=REASONS["rounding"].advice,
            severity="info",
            measured=0.0,
            threshold=limits["ratio"],
        )


def _resting(table: ParamTable, memory: Memory, gaps: float) -> NDArray[np.bool_]:
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
    return np.asarray(count <= gaps * longest)


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
            "negligible": Threshold(1e-5, "of the median gradient: that of a vector is rounding"),
        },
        advice=tuple(f"if {why.words}: {why.advice[0]}" for why in REASONS.values()),
    ),
)

"""The learning rate: jumps, a rate of 0, a rate at which nothing is learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distmon.record.record import Record
from distmon.rules.advice import before_clipping, number
from distmon.rules.base import (
    Finding,
    Limits,
    Memory,
    Rule,
    Threshold,
    median_of,
    metric,
    name_some,
)
from distmon.rules.layer_stacks import fingerprint
from distmon.rules.lr_schedule import lr_phase
from distmon.rules.rounding import is_coarse

LR = "train/lr"


def check_jump(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find a learning rate far above all that the run has had so far."""
    lr, peak = metric(record, LR), record.history.lr_peak
    if lr is None or not peak or record.history.records < limits["history"]:
        return
    # A rate that rises by a factor from observation to observation does so by its schedule.
    last, *earlier = reversed(record.history.lrs)
    growth = last / earlier[0] if earlier and earlier[0] > 0 else 1.0
    if lr > limits["factor"] * max(1.0, growth) * peak:
        yield Finding(
            key="jump",
            message=f"the learning rate jumped to {number(lr)}, {lr / peak:.0f}x the highest "
            f"before ({number(peak)})",
            advice=(
                f"if it is not intended, set it back to {number(peak)} and resume from a "
                "checkpoint before the jump",
                *_ADVICE_JUMP[1:],
            ),
            measured=lr / peak,
            threshold=limits["factor"],
            is_new=True,
        )


def check_zero(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a learning rate of 0 that no decay explains, or that training goes on with for long."""
    lr, peak = metric(record, LR), record.history.lr_peak
    if lr is None or lr > 0:
        memory.clear()
        return
    memory["count"] = memory.get("count", 0) + 1
    since = memory.setdefault("since", record.step)
    before, *earlier = memory.setdefault("before", [*reversed(record.history.lrs)] or [0.0])
    falling = bool(earlier) and before < limits["falling"] * earlier[-1]
    if peak and (before < limits["decayed"] * peak or falling):
        # The schedule has come to its end, and the run should, too.
        waited = record.step - since
        if memory["count"] > limits["after_end"] and waited > limits["share"] * record.step:
            yield Finding(
                key="ended",
                message=f"the learning rate has been 0 for {waited} steps, since its decay ended "
                f"before step {since}: training goes on, but no parameter is updated",
                measured=float(waited),
                threshold=limits["share"] * record.step,
            )
        return
    if peak or memory["count"] >= limits["from_start"]:
        was = f"; it was {number(before)} at the observation before" if peak else " from the start"
        yield Finding(
            key="zero",
            message=f"the learning rate is 0: no parameter is updated{was}",
            measured=0.0,
            threshold=0.0,
        )


def check_learning(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a run whose updates are far too small to learn anything."""
    phase = lr_phase(record, memory)
    c = record.params.columns
    ratio = c["update_ratio"]
    with np.errstate(invalid="ignore"):
        matrices = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0) & (c["ndim"] >= 2)
        learning = (ratio > 0) & matrices & (c["lr"] > 0) & (c["has_grad"] > 0)
    if not learning.any() or phase in ("rising", "ending", "off"):
        return
    start, best = record.history.start, record.history.best
    fallen = start is not None and best is not None and best < start - 0.1 * abs(start)
    if fallen and not record.history.need_not_fall(record):
        return  # the updates of a run that has converged are small
    middle = median_of(ratio[learning])
    lost = metric(record, "monitor/update_lost_fraction") or 0.0
    if not (is_coarse(record) & learning).any():
        lost = 0.0  # in fp32 rounding takes only what is far too small by itself
    kept = 1 / before_clipping(record)
    clipped = kept < limits["clipped"] and middle < limits["clipped_ratio"]
    if (middle < limits["ratio"] or clipped) and lost < limits["lost"]:
        lr = metric(record, LR)
        rate = f" at a learning rate of {number(lr)}" if lr else ""
        if kept < limits["clipped"]:
            rate += f", with gradients that are clipped to {kept:.0e} of their norm"
        yield Finding(
            key="learning",
            message=f"a step changes half of the matrices by less than {middle:.0e} of their norm"
            f"{rate}: it takes {1 / max(middle, 1e-30):.0e} such steps to change them",
            advice=_ADVICE_CLIPPED if kept < limits["clipped"] else (),
            measured=middle,
            threshold=limits["clipped_ratio"] if clipped else limits["ratio"],
        )


def check_able(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Name, once, the parameters that an optimizer has but that cannot learn.

    Those that are switched on after a while follow a schedule.
    """
    if memory.get("seen"):
        return
    c = record.params.columns
    memory["waited"] = memory.get("waited", 0) + 1
    off = (c["requires_grad"] == 0) & (c["in_optimizer"] > 0)
    names = fingerprint(record.params.names)
    if memory.get("names") == names:
        off &= np.isin(np.arange(len(record.params)), memory["off"])
    memory["names"], memory["off"] = names, np.flatnonzero(off).tolist()
    if memory["waited"] < limits["waits"]:
        return
    memory["seen"] = True
    rows = np.flatnonzero(off)
    for i in rows:
        name = record.params.names[i]
        yield Finding(key=name, group="able", message="", params=(name,))


def _combine_able(findings: Sequence[Finding]) -> str:
    names = name_some([f.key for f in findings])
    return (
        f"the optimizer has {len(findings)} parameters that cannot learn, because requires_grad is "
        f"False: {names}"
    )


_ADVICE_CLIPPED = (
    "check the clipping norm: it is far below the norm of the gradients, so that hardly anything "
    "is left of them; Adam no longer makes up for it where they are below its eps",
    "clip at a norm that most steps stay below",
)
_ADVICE_JUMP = (
    "set it back and resume from a checkpoint before the jump",
    "check the scheduler: a state that was not loaded on resume, steps counted per batch instead "
    "of per epoch, a restart",
)

RULES = (
    Rule(
        name="lr_jump",
        summary="learning rate > factor times the highest before",
        check=check_jump,
        severity="warning",
        needs=(LR,),
        thresholds={
            "factor": Threshold(3.0, "times the highest learning rate of the run so far"),
            "history": Threshold(2, "observations before it is compared"),
        },
        advice=_ADVICE_JUMP,
    ),
    Rule(
        name="lr_zero",
        summary="learning rate 0, not at the end of a decay, or for a tenth of the run after it",
        check=check_zero,
        severity="warning",
        cooldown=30,
        needs=(LR,),
        thresholds={
            "decayed": Threshold(0.1, "share of its peak below which a decay explains a rate of 0"),
            "falling": Threshold(0.9, "share of its value three observations before: it decays"),
            "after_end": Threshold(5, "observations with a rate of 0 after a decay"),
            "share": Threshold(0.1, "of the run that these have to be"),
            "from_start": Threshold(3, "observations with a rate of 0 from the start"),
        },
        advice=(
            "check the scheduler: total steps that are fewer than the run has, a factor of 0, a "
            "state that was not loaded on resume",
            "resume with the rate that was meant: nothing has been learned since",
        ),
    ),
    Rule(
        name="not_learning",
        summary="median update ratio of the matrices < ratio while the loss has not fallen; "
        "not in warmup or after decay",
        check=check_learning,
        severity="warning",
        patience=3,
        cooldown=30,
        needs=("params",),
        thresholds={
            "ratio": Threshold(4e-6, "smallest healthy median update ratio"),
            "clipped": Threshold(1e-4, "share of the gradient norm that clipping leaves"),
            "clipped_ratio": Threshold(1e-4, "median update ratio that is too small with it"),
            "lost": Threshold(0.5, "share of updates lost to rounding that is the reason instead"),
        },
        advice=(
            "raise the learning rate until a step changes weights by about 1e-4 to 1e-3 of their "
            "norm",
            "check that nothing shrinks the gradients: a clip far below their norm, a loss weight "
            "near 0 with plain SGD",
        ),
    ),
    Rule(
        name="cannot_learn",
        summary="parameters in the optimizer without requires_grad in the first `waits` "
        "observations, named once",
        check=check_able,
        combine_messages=_combine_able,
        thresholds={"waits": Threshold(10, "observations in which none of them is switched on")},
        severity="info",
        needs=("params",),
        advice=(
            "set requires_grad=True if they are to learn; their momentum is allocated in vain "
            "otherwise",
        ),
    ),
)

"""Tasks of a multi-task model whose gradients in shared parameters differ in size."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import isfinite

from distmon.record.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some

_LARGEST = 1e6
"""Ratio of a task when all other gradients are zero."""


def _ratios(record: Record) -> dict[str, float]:
    """Return each task's norm divided by the mean of the others; empty if not comparable."""
    norms = dict(record.tasks)
    if len(norms) < 2 or not all(isfinite(n) and n >= 0 for n in norms.values()):
        return {}
    total = sum(norms.values())
    if total <= 0:
        return {}
    ratios = {}
    for task, norm in norms.items():
        others = (total - norm) / (len(norms) - 1)
        ratios[task] = min(_LARGEST, norm / others) if others > 0 else _LARGEST
    return ratios


def check_imbalance(
    record: Record,
    limits: Limits,
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """Find tasks whose gradient is now far above or below that of the others."""
    ratios = _ratios(record)
    # With two tasks the ratios are reciprocal: report the larger one, unless it is in the limit.
    strong = {task: r for task, r in ratios.items() if r > limits["high"]}
    weak = {task: r for task, r in ratios.items() if r < limits["low"]}
    for task, ratio in (strong or weak).items():
        side, limit = ("above", limits["high"]) if strong else ("below", limits["low"])
        yield Finding(
            key=f"{side} {task}",
            message=f"the gradient of task {task} is {ratio:.2f}x the mean of the others, {side} "
            f"{limit:g}",
            advice=(_weigh(task, ratio), *_ADVICE[1:]),
            measured=ratio,
            threshold=limit,
        )


def check_collapse(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find tasks that dominate or starve on average over many checks."""
    ratios = _ratios(record)
    if not ratios:
        return
    checks = max(1, int(limits["checks"]))
    memory["ratios"] = past = {
        task: [*memory.get("ratios", {}).get(task, []), ratio][-checks:]
        for task, ratio in ratios.items()
    }
    means = {t: statistics.fmean(values) for t, values in past.items() if len(values) == checks}
    strong = [task for task, mean in means.items() if mean > limits["high"]]
    weak = [task for task, mean in means.items() if mean < limits["low"]]
    for task in strong or weak:
        word, limit = ("dominates", limits["high"]) if strong else ("starves", limits["low"])
        starving = f"; {name_some(weak)} starves" if strong and weak else ""
        yield Finding(
            key=f"{word} {task}",
            message=f"task {task} {word}: its gradient was {means[task]:.2f}x the mean of the "
            f"others over the last {checks} checks (limit {limit:g}){starving}",
            advice=(_weigh(task, means[task]), *_ADVICE[1:]),
            measured=means[task],
            threshold=limit,
        )


def _combine_messages(findings: Sequence[Finding]) -> str:
    return "; ".join(finding.message for finding in findings)


def _weigh(task: str, ratio: float) -> str:
    """Advise a loss weight that brings the task's gradient to the mean of the others."""
    if not 1e-3 < ratio < 1e3:
        return f"check the loss of task {task} and of the others: one of them has no gradient"
    return f"multiply the loss of task {task} by {1 / ratio:.2g}"


_ADVICE = (
    "weight the losses so that their gradients have similar norms",
    "balance them during the run (GradNorm, uncertainty weighting)",
    "check that all losses use the same reduction (mean or sum) and that no task is out of data",
)

RULES = (
    Rule(
        name="task_imbalance",
        summary="gradient norm of a task outside low..high times the mean of the others",
        check=check_imbalance,
        combine_messages=_combine_messages,
        severity="info",
        patience=3,
        needs=("tasks",),
        thresholds={
            "high": Threshold(2.0, "largest healthy ratio"),
            "low": Threshold(0.5, "smallest healthy ratio"),
        },
        advice=_ADVICE,
    ),
    Rule(
        name="task_collapse",
        summary="that ratio, averaged over the last `checks`, > high or < low",
        check=check_collapse,
        combine_messages=_combine_messages,
        severity="warning",
        needs=("tasks",),
        thresholds={
            "high": Threshold(5.0, "mean ratio above which a task dominates"),
            "low": Threshold(0.2, "mean ratio below which a task starves"),
            "checks": Threshold(10, "checks that are averaged"),
        },
        advice=_ADVICE,
    ),
)

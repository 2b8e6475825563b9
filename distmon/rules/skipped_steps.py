"""Skipped optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a run that skips most optimizer steps; a GradScaler may skip a few."""
    if metric(record, "debug/stepped_elsewhere"):
        memory.clear()
        yield Finding(
            key="elsewhere",
            message="the weights change, but none of the attached optimizers has stepped since the "
            "last record: updates and gradients are not measured",
            advice=_ADVICE_ELSEWHERE,
        )
        return
    steps = memory.get("steps", 0) + len(record.losses)
    skipped = memory.get("skipped", 0) + (metric(record, "train/skipped_steps") or 0.0)
    if steps < limits["min_steps"]:
        memory["steps"], memory["skipped"] = steps, skipped
        return
    memory.clear()
    share = min(1.0, skipped / steps)
    if share > limits["fraction"]:
        yield Finding(
            key="skipped",
            message=f"{skipped:.0f} of the last {steps} optimizer steps were skipped (limit "
            f"{limits['fraction']:.0%})",
            measured=share,
            threshold=limits["fraction"],
        )


_ADVICE_ELSEWHERE = (
    "attach to the optimizer that trains the model: after creating a new one, close the monitor "
    "and call distmon.attach again",
    "for an optimizer without step hooks, attach with hooks=False and call before_step() and "
    "after_step() yourself",
)

RULES = (
    Rule(
        name="steps_skipped",
        summary="more than `fraction` of at least `min_steps` optimizer steps were skipped",
        check=check,
        severity="warning",
        thresholds={
            "fraction": Threshold(0.5, "share of skipped steps that is still healthy"),
            "min_steps": Threshold(20, "minimum steps: a scaler may skip a dozen at the start"),
        },
        advice=(
            "call monitor.step() once per optimizer step, not once per micro-batch",
            "check the loss scale: if it keeps halving, the gradients are never finite",
            "find the first non-finite loss or activation; the scaler hides it by skipping steps",
            "use bf16 where the hardware supports it",
        ),
    ),
)

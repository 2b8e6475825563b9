"""Optimizer steps that are left out again and again."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """A GradScaler may skip a few steps; a run that skips most of them does not train."""
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


RULES = (
    Rule(
        name="steps_skipped",
        summary="more than `fraction` of at least `min_steps` optimizer steps were skipped",
        check=check,
        severity="warning",
        thresholds={
            "fraction": Threshold(0.5, "share of skipped steps that is still healthy"),
            "min_steps": Threshold(20, "steps to judge by: a scaler may skip a dozen at the start"),
        },
        advice=(
            "look at the loss scale: one that halves without end means gradients that are never "
            "finite",
            "find the first non-finite loss or activation; the scaler hides it by skipping",
            "use bf16 where the hardware has it",
        ),
    ),
)

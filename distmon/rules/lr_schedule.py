"""The phase of the learning-rate schedule, inferred from the recorded learning rates."""

from __future__ import annotations

from typing import Final, Literal

from distmon.record.record import Record
from distmon.rules.base import Memory, metric

ENDING: Final = 0.25
"""Share of its maximum below which the learning rate has decayed."""

Phase = Literal["rising", "steady", "ending", "off", "unknown"]


def lr_phase(record: Record, memory: Memory) -> Phase:
    """Return the phase of the learning rate, and update `memory["lr"]`.

    `rising` is a warmup, `off` a rate of 0. The first rate is `steady`; a record without a rate
    repeats the last one.
    """
    lr = metric(record, "train/lr")
    if lr is None and "lr" not in memory:
        return "unknown"
    last, highest = memory.get("lr", (lr, lr))
    lr = last if lr is None else lr
    memory["lr"] = [lr, max(lr, highest)]
    if lr <= 0:
        return "off"
    if lr > last:
        return "rising"
    return "ending" if lr < ENDING * highest else "steady"

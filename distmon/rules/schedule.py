"""Where the learning rate stands, seen from one observation to the next."""

from __future__ import annotations

from typing import Final, Literal

from distmon.record import Record
from distmon.rules.base import Memory, metric

ENDING: Final = 0.25
"""Below this share of its highest value a learning rate is about to end the training."""

Phase = Literal["rising", "steady", "ending", "off", "unknown"]


def follow_lr(record: Record, memory: Memory) -> Phase:
    """What the learning rate does; remembers it in `memory["lr"]`.

    `rising` is a warmup, `off` a rate of 0. A rate that is seen for the first time is `steady`, and
    a record without one leaves it where it was.
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

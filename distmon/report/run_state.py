"""Whether a run is going on, from what its folder says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final, Literal

State = Literal["running", "alerting", "finished", "died", "empty"]
PATIENCE_S: Final = 60.0
"""A run is taken for dead after this, and five times its usual time between records."""
RECENT: Final = 5
"""Observations within which an alert makes a run `alerting`."""


def run_state(
    info: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    alerts: Sequence[Mapping[str, Any]],
    now: float,
    closed: bool = False,
) -> tuple[State, str]:
    """Return the state, and why in one sentence.

    `closed`: whether the folder says that the newest attempt has ended. Folders of older versions
    do not say it; there the partial record that `close` writes and the time without a new record
    count.
    """
    if not records:
        return "empty", "no observation yet"
    last = records[-1]
    total = info.get("config", {}).get("total_steps")
    steps = _last_step(records)
    if total and steps >= total:
        return "finished", f"reached step {total}"
    of = f" of {total}" if total else ""
    if closed:
        return "finished", f"closed after step {steps}{of}"
    quiet = now - _time(last)
    usual = _usual_time(records)
    if quiet > PATIENCE_S + 5 * usual:
        if last.get("partial"):
            return "finished", f"closed after step {steps}{of}"
        return "died", f"no record for {_duration(quiet)}; the last is of step {steps}{of}"
    since = records[-RECENT]["step"] if len(records) >= RECENT else 0
    recent = [a for a in alerts if a["step"] >= since and a["severity"] != "info"]
    if recent:
        return "alerting", f"{recent[-1]['rule']} at step {recent[-1]['step']}"
    return "running", f"step {steps}{of}"


def _last_step(records: Sequence[Mapping[str, Any]]) -> int:
    return max(int(r["step"]) for r in records[-2:])


def _usual_time(records: Sequence[Mapping[str, Any]]) -> float:
    times = [_time(record) for record in records[-20:]]
    gaps = [b - a for a, b in pairwise(times) if b > a]
    return median(gaps) if gaps else 0.0


def _time(record: Mapping[str, Any]) -> float:
    value = record.get("time")
    return math.nan if value is None else float(value)


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"

"""Memory and devices: full, leaking, hot, throttled, idle, failing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distmon.record import Column, Record
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, metric
from distmon.telemetry.hardware import alarming, throttle_words
from distmon.telemetry.hardware.throttle import POWER_CAP
from distmon.telemetry.trend import creep

ALLOCATED, RESIDENT = "memory/allocated_bytes", "memory/rss_bytes"
LEAKING = (("allocated_bytes", ALLOCATED, "device"), ("rss_bytes", RESIDENT, "host"))
UTILISATION = "hardware/utilisation"
TEMPERATURE = "hardware/temperature"
WINDOW = 256
MB = 2**20


def _column(record: Record, name: str) -> Column:
    return np.asarray(record.ranks.get(name, np.zeros(0)), dtype=np.float64)


def _ranks(where: Sequence[int], most: int = 5) -> str:
    shown = ", ".join(map(str, where[:most]))
    return f"rank {shown}" + (f" and {len(where) - most} more" if len(where) > most else "")


def check_full(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Device memory as its driver counts it, everybody's together."""
    used, total = _column(record, "memory_used_bytes"), _column(record, "memory_total_bytes")
    with np.errstate(divide="ignore", invalid="ignore"):
        share = used / total
    full = np.flatnonzero(share > (1 - MARGIN * 0.1) * limits["share"])
    if not full.size:
        return
    worst = int(full[np.argmax(share[full])])
    yield Finding(
        key="full",
        message=f"{share[worst]:.1%} of the device memory of rank {worst} is in use (limit "
        f"{limits['share']:.0%}); {_ranks(full.tolist())} in all",
        ranks=tuple(full.tolist()),
        measured=float(share[worst]),
        threshold=limits["share"],
        fading=bool(share[worst] <= limits["share"]),
    )


def check_creep(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Memory that grows without end, on the device or on the host, and the rank of most growth.

    The series is the growth of that rank since the first record: the fullest rank may be another
    one, which holds more and leaks nothing.
    """
    for column, tag, what in LEAKING:
        now = np.nan_to_num(_column(record, column))  # 0: a rank that did not tell
        by_rank = bool(now.any())
        if not by_rank:  # a foreign log knows the fullest rank alone
            now = np.array([metric(record, tag) or 0.0])
        kept = memory.get(what, {})
        if len(kept.get("first", ())) != len(now):
            kept = {"first": [0.0] * len(now), "steps": [], "grown": []}
        first = np.asarray(kept["first"])
        first = np.where(first > 0, first, now)
        grown = np.where(now > 0, now - first, -np.inf)
        worst = int(np.argmax(grown))
        if not now[worst] > 0:
            continue
        steps = [*kept["steps"], record.step][-WINDOW:]
        series = [*kept["grown"], float(grown[worst])][-WINDOW:]
        memory[what] = {"first": first.tolist(), "steps": steps, "grown": series}
        slope = creep(series, steps, WINDOW)
        growth = slope * (steps[-1] - steps[0]) / (float(first[worst]) + series[0])
        # Warming up looks like a leak for a while: the shorter the look, the more it takes.
        limit = limits["growth"] * WINDOW / len(steps)
        if growth > limit:
            rank = f"rank {worst}" if by_rank else "the fullest rank"
            yield Finding(
                key=what,
                message=f"memory of the {what} keeps growing, most on {rank}: by "
                f"{1000 * slope / MB:,.1f} MB per 1000 steps, {growth:.0%} since step {steps[0]} "
                f"(limit {limit:.0%} over {len(steps)} records)",
                ranks=(worst,) if by_rank else (),
                measured=growth,
                threshold=limit,
            )


def check_retries(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """The allocator emptied its cache to find room; each time stalls the device."""
    now = np.nan_to_num(_column(record, "retries"))
    before = np.asarray(memory.get("retries", []), dtype=np.float64)
    memory["retries"] = now.tolist()
    if now.shape != before.shape:
        return
    grown = np.flatnonzero(now - before > limits["retries"])
    if grown.size:
        worst = int(grown[np.argmax((now - before)[grown])])
        yield Finding(
            key="retries",
            message=f"the allocator of rank {worst} had to empty its cache "
            f"{now[worst] - before[worst]:.0f} times since the last record; "
            f"{_ranks(grown.tolist())} in all",
            ranks=tuple(grown.tolist()),
            measured=float(now[worst] - before[worst]),
            threshold=limits["retries"],
        )


def check_underused(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Devices that wait most of the time."""
    use = metric(record, UTILISATION)
    if use is None or use >= (1 + MARGIN) * limits["share"]:
        return
    yield Finding(
        key="underused",
        message=f"devices are busy {use:.0%} of the time on average (limit {limits['share']:.0%})",
        measured=use,
        threshold=limits["share"],
        fading=use >= limits["share"],
    )


def check_throttled(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Clocks held down for a reason other than load."""
    reasons = _column(record, "throttle_reasons")
    known = np.flatnonzero(np.isfinite(reasons))
    # A board at its power limit is what full load looks like.
    bad = [int(r) for r in known if alarming(int(reasons[r])) & ~POWER_CAP]
    if bad:
        words = ", ".join(throttle_words(int(reasons[bad[0]])))
        yield Finding(
            key="throttled",
            message=f"the device of rank {bad[0]} is throttled ({words}); {_ranks(bad)} in all",
            ranks=tuple(bad),
        )


def check_hot(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Chips near the temperature at which they slow down."""
    degrees = _column(record, "temperature_c")
    hot = np.flatnonzero(degrees > limits["celsius"] - 2)
    if not hot.size:
        return
    worst = int(hot[np.argmax(degrees[hot])])
    yield Finding(
        key="hot",
        message=f"the device of rank {worst} is at {degrees[worst]:.0f} C (limit "
        f"{limits['celsius']:g}); {_ranks(hot.tolist())} in all",
        ranks=tuple(hot.tolist()),
        measured=float(degrees[worst]),
        threshold=limits["celsius"],
        fading=bool(degrees[worst] <= limits["celsius"]),
    )


def check_ecc(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Uncorrected memory errors since the first record: data was lost on the way."""
    now = np.nan_to_num(_column(record, "ecc_uncorrected"))
    first = np.asarray(memory.setdefault("first", now.tolist()), dtype=np.float64)
    if first.shape != now.shape:
        memory["first"] = now.tolist()
        return
    new = np.flatnonzero(now - first > limits["errors"])
    if new.size:
        worst = int(new[np.argmax((now - first)[new])])
        yield Finding(
            key="ecc",
            message=f"the device of rank {worst} had {now[worst] - first[worst]:.0f} uncorrected "
            "memory errors since the run began",
            ranks=tuple(new.tolist()),
            measured=float(now[worst] - first[worst]),
            threshold=limits["errors"],
        )


RULES = (
    Rule(
        name="memory_high",
        summary="device memory in use > share of it",
        check=check_full,
        severity="warning",
        patience=2,
        needs=("hardware/memory_fraction",),
        thresholds={"share": Threshold(0.95, "of the device's memory")},
        advice=(
            "a smaller micro-batch with more accumulation, or activation checkpointing",
            "look at fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "look for another process on the device",
        ),
    ),
    Rule(
        name="memory_creep",
        summary="memory keeps growing: > growth over 256 observations, more over fewer",
        check=check_creep,
        severity="warning",
        cooldown=50,
        needs=(ALLOCATED, RESIDENT),
        thresholds={
            "growth": Threshold(0.05, "relative growth over 256; over n, 256 / n times that")
        },
        advice=(
            "look for tensors kept with their graph: losses in a list, metrics without detach()",
            "look for a cache without a bound, also in the data loader's workers",
        ),
    ),
    Rule(
        name="memory_retries",
        summary="the allocator emptied its cache > retries times since the last record",
        check=check_retries,
        severity="warning",
        needs=("ranks",),
        thresholds={"retries": Threshold(0, "times that are still healthy")},
        advice=(
            "leave more room: a smaller micro-batch, activation checkpointing, more shards",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
        ),
    ),
    Rule(
        name="gpu_underused",
        summary="mean utilisation of the devices < share",
        check=check_underused,
        severity="info",
        patience=5,
        needs=(UTILISATION,),
        thresholds={"share": Threshold(0.5, "of the time with a kernel running")},
        advice=(
            "look at the phases: data and optimizer are the usual ones",
            "a larger batch, CUDA graphs or torch.compile where kernels are small",
        ),
    ),
    Rule(
        name="gpu_throttled",
        summary="a clock is held down by power, heat or hardware",
        check=check_throttled,
        severity="warning",
        patience=2,
        needs=("hardware/temperature",),
        advice=(
            "check cooling and power of that host; compare its clocks with the others'",
            "take the host out of the job if it slows down the rest",
        ),
    ),
    Rule(
        name="gpu_hot",
        summary="temperature of a device > celsius",
        check=check_hot,
        severity="warning",
        patience=2,
        needs=(TEMPERATURE,),
        thresholds={"celsius": Threshold(85, "degrees")},
        advice=("check the cooling of that host", "lower its power limit until it is repaired"),
    ),
    Rule(
        name="gpu_ecc",
        summary="uncorrected memory errors since the run began > errors",
        check=check_ecc,
        severity="critical",
        needs=("ranks",),
        thresholds={"errors": Threshold(0, "errors that are still healthy")},
        advice=(
            "do not trust the weights since then: go back to a checkpoint from before",
            "take the device out of service and run its diagnostics",
        ),
    ),
)

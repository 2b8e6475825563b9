"""Memory and devices: full or leaking memory; hot, throttled, idle or failing devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distmon.collect.telemetry.hardware import throttle_words, unexpected_reasons
from distmon.collect.telemetry.hardware.throttle import POWER_CAP
from distmon.record.record import Column, Record
from distmon.rules.base import (
    MARGIN,
    Finding,
    Limits,
    Memory,
    Rule,
    Threshold,
    metric,
    name_some,
)
from distmon.rules.memory_trend import sustained_growth

ALLOCATED, RESIDENT = "memory/allocated_bytes", "memory/rss_bytes"
LEAKING = (("allocated_bytes", ALLOCATED, "device"), ("rss_bytes", RESIDENT, "host"))
UTILIZATION = "hardware/utilization"
TEMPERATURE = "hardware/temperature"
WINDOW = 256
MB = 2**20


def _column(record: Record, name: str) -> Column:
    return np.asarray(record.ranks.get(name, np.zeros(0)), dtype=np.float64)


def _affected(ranks: Sequence[int]) -> str:
    """Return `; affected: rank 1, 3` for several ranks, nothing for one."""
    return f"; affected: rank {name_some([*map(str, ranks)])}" if len(ranks) > 1 else ""


def check_full(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Check the device memory that the driver reports, of all processes together."""
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
        f"{limits['share']:.0%}){_affected(full.tolist())}",
        ranks=tuple(full.tolist()),
        measured=float(share[worst]),
        threshold=limits["share"],
        fading=bool(share[worst] <= limits["share"]),
    )


def check_creep(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find device or host memory that keeps growing, and the rank where it grows most.

    The series is the growth of that rank since the first record, because the rank that uses most
    memory need not be the one that leaks.
    """
    for column, tag, what in LEAKING:
        now = np.nan_to_num(_column(record, column))  # 0: a rank without a value
        by_rank = bool(now.any())
        if not by_rank:  # logs of other tools have only the maximum over ranks
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
        slope = sustained_growth(series, steps, WINDOW)
        growth = slope * (steps[-1] - steps[0]) / (float(first[worst]) + series[0])
        # Memory also grows at the start of a run, so a shorter series needs a larger growth.
        limit = limits["growth"] * WINDOW / len(steps)
        if growth > limit:
            rank = f"rank {worst}" if by_rank else "the rank that uses most"
            yield Finding(
                key=what,
                message=f"{what} memory keeps growing, most on {rank}: by "
                f"{1000 * slope / MB:,.1f} MB per 1000 steps, {growth:.0%} since step {steps[0]} "
                f"(limit {limit:.0%} over {len(steps)} records)",
                ranks=(worst,) if by_rank else (),
                measured=growth,
                threshold=limit,
            )


def check_retries(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Check how often the caching allocator had to free its cache, which stalls the device."""
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
            message=f"the caching allocator of rank {worst} freed its cache to find memory "
            f"{now[worst] - before[worst]:.0f} times since the last record"
            f"{_affected(grown.tolist())}",
            ranks=tuple(grown.tolist()),
            measured=float(now[worst] - before[worst]),
            threshold=limits["retries"],
        )


def check_underused(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Check for devices that are idle most of the time."""
    use = metric(record, UTILIZATION)
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
    """Check for clocks that are reduced for a reason other than load."""
    reasons = _column(record, "throttle_reasons")
    known = np.flatnonzero(np.isfinite(reasons))
    # A board at its power limit is normal under full load.
    bad = [int(r) for r in known if unexpected_reasons(int(reasons[r])) & ~POWER_CAP]
    if bad:
        words = ", ".join(throttle_words(int(reasons[bad[0]])))
        yield Finding(
            key="throttled",
            message=f"the device of rank {bad[0]} is throttled ({words}){_affected(bad)}",
            ranks=tuple(bad),
        )


def check_hot(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Check for devices near the temperature at which they throttle."""
    degrees = _column(record, "temperature_c")
    hot = np.flatnonzero(degrees > limits["celsius"] - 2)
    if not hot.size:
        return
    worst = int(hot[np.argmax(degrees[hot])])
    yield Finding(
        key="hot",
        message=f"the device of rank {worst} is at {degrees[worst]:.0f} C (limit "
        f"{limits['celsius']:g}){_affected(hot.tolist())}",
        ranks=tuple(hot.tolist()),
        measured=float(degrees[worst]),
        threshold=limits["celsius"],
        fading=bool(degrees[worst] <= limits["celsius"]),
    )


def check_ecc(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Check for uncorrected memory errors since the first record, which corrupt data."""
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
            "memory errors since the run began" + _affected(new.tolist()),
            ranks=tuple(new.tolist()),
            measured=float(now[worst] - first[worst]),
            threshold=limits["errors"],
        )


RULES = (
    Rule(
        name="memory_high",
        summary="device memory in use > share of the total",
        check=check_full,
        severity="warning",
        patience=2,
        needs=("hardware/memory_fraction",),
        thresholds={"share": Threshold(0.95, "of the device's memory")},
        advice=(
            "use a smaller micro-batch with more gradient accumulation, or activation "
            "checkpointing",
            "reduce fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "check for another process on the device",
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
            "look for tensors that keep their autograd graph: losses in a list, metrics without "
            "detach()",
            "look for an unbounded cache, also in the data loader's workers",
        ),
    ),
    Rule(
        name="memory_retries",
        summary="the caching allocator freed its cache > retries times since the last record",
        check=check_retries,
        severity="warning",
        needs=("ranks",),
        thresholds={"retries": Threshold(0, "times that are still healthy")},
        advice=(
            "free memory: a smaller micro-batch, activation checkpointing, more shards",
            "reduce fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
    ),
    Rule(
        name="gpu_underused",
        summary="mean utilization of the devices < share",
        check=check_underused,
        severity="info",
        patience=5,
        needs=(UTILIZATION,),
        thresholds={"share": Threshold(0.5, "of the time with a kernel running")},
        advice=(
            "look at the phase times: data and optimizer are the usual causes",
            "use a larger batch, or CUDA graphs or torch.compile where kernels are small",
        ),
    ),
    Rule(
        name="gpu_throttled",
        summary="a device clock is reduced by power, heat or hardware",
        check=check_throttled,
        severity="warning",
        patience=2,
        needs=("hardware/temperature",),
        advice=(
            "check cooling and power of that host; compare its clocks with those of other hosts",
            "remove the host from the job if it slows down the other ranks",
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
            "do not trust the weights since then: resume from a checkpoint before the error",
            "remove the device from the job and run its diagnostics",
        ),
    ),
)

"""Speed of the run: throughput, step time, data loading, stragglers, MFU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import numpy as np

from distmon.metrics import PHASES
from distmon.record.record import Record
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, median_of, metric
from distmon.rules.stragglers import find_stragglers

RATES = ("performance/tokens_per_second", "performance/samples_per_second")
STEP = "performance/step_seconds"
DATA = "performance/data_fraction"
MFU = "performance/mfu_over_limit"


def _is_too_short(record: Record, limits: Limits) -> bool:
    """Return whether the steps are so short that their times are noise.

    It takes the median over ranks, without the phase `other`. Logs of other tools have no phases
    and are always evaluated.
    """
    columns = [record.ranks.get(f"{phase}_seconds") for phase in PHASES if phase != "other"]
    known = [column for column in columns if column is not None]
    by_rank = np.add.reduce(known) if known else np.array([math.inf])
    by_rank = by_rank[~np.isnan(by_rank)]
    return bool(by_rank.size and median_of(by_rank) < limits["min_step_seconds"])


def check_throughput(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the throughput with its own recent median."""
    tag = next((tag for tag in RATES if metric(record, tag) is not None), None)
    if tag is None:
        return
    rate = metric(record, tag)
    assert rate is not None
    past = memory.get("rates", [])
    memory["rates"] = [*past, rate][-int(limits["window"]) :]
    if len(past) < limits["armed_after"] or _is_too_short(record, limits):
        return
    usual = statistics.median(past)
    if usual <= 0:
        return
    drop = 1 - rate / usual
    if drop <= (1 - MARGIN) * limits["warning"]:
        return
    critical = drop > limits["critical"]
    limit = limits["critical"] if critical else limits["warning"]
    what = tag.rpartition("/")[2].replace("_per_second", "/s")
    yield Finding(
        key="throughput",
        message=f"throughput is {rate:.4g} {what}, {drop:.0%} below its recent median {usual:.4g} "
        f"(limit {limit:.0%})",
        severity="critical" if critical else None,
        measured=drop,
        threshold=limit,
        fading=drop <= limits["warning"],
    )


def check_jitter(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the mean step time since the last record with its recent median."""
    seconds = metric(record, STEP)
    if seconds is None:
        return
    past = memory.get("seconds", [])
    memory["seconds"] = [*past, seconds][-int(limits["window"]) :]
    if len(past) < limits["armed_after"] or _is_too_short(record, limits):
        return
    usual = statistics.median(past)
    if usual > 0 and seconds > (1 - MARGIN) * limits["factor"] * usual:
        yield Finding(
            key="jitter",
            message=f"the mean step time since the last record is {seconds:.3g} s, "
            f"{seconds / usual:.1f}x the recent median {usual:.3g} s (limit {limits['factor']:g}x)",
            measured=seconds / usual,
            threshold=limits["factor"],
            fading=seconds <= limits["factor"] * usual,
        )


def check_data(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Check the time between the end of a step and the next forward."""
    share = metric(record, DATA)
    if _is_too_short(record, limits):
        return
    if share is None or share <= (1 - MARGIN) * limits["warning"]:
        return
    critical = share > limits["critical"]
    limit = limits["critical"] if critical else limits["warning"]
    by_rank = record.ranks.get("data_seconds")
    worst = () if by_rank is None or not len(by_rank) else (int(np.nanargmax(by_rank)),)
    yield Finding(
        key="data",
        message=f"training waits for data {share:.0%} of the step time (limit {limit:.0%})"
        + (f", longest on rank {worst[0]}" if worst else ""),
        severity="critical" if critical else None,
        ranks=worst,
        measured=share,
        threshold=limit,
        fading=share <= limits["warning"],
    )


def check_straggler(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find ranks with a long phase that the others wait for."""
    since = memory.get("since", {})
    found = find_stragglers(record.ranks, limits["share"], limits["sigmas"], limits["min_seconds"])
    kept: dict[str, list[int]] = {}
    for slow in found:
        key = f"rank {slow.rank} {slow.phase}"
        first, times = since.get(key, [record.step, 0])
        kept[key] = [first, times + 1]
        critical = slow.share > limits["critical_share"] and times + 1 >= limits["critical_after"]
        host = record.hosts[slow.rank] if slow.rank < len(record.hosts) else ""
        where = f"rank {slow.rank}" + (f" on {host}" if host else "")
        yield Finding(
            key=key,
            message=f"{where} is slower than the others: its {slow.phase} phase takes "
            f"{slow.excess_seconds * 1000:.3g} ms longer than the median rank's, {slow.share:.0%} "
            f"of a step (limit {limits['share']:.0%}), since step {first}; "
            + ("1 rank waits" if len(slow.waiting) == 1 else f"{len(slow.waiting)} ranks wait")
            + " for it",
            severity="critical" if critical else None,
            ranks=(slow.rank,),
            measured=slow.share,
            threshold=limits["share"],
        )
    memory["since"] = kept


def check_mfu(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Report an MFU above 100%, which means that one of its inputs is wrong."""
    value = metric(record, MFU)
    if value is not None:
        yield Finding(
            key="mfu",
            message=f"MFU is {value:.0%}, which is impossible: the FLOPs of the model, the tokens "
            "passed to step(), or the peak FLOP/s of the device are wrong",
            measured=value,
            threshold=1.0,
        )


RULES = (
    Rule(
        name="straggler",
        summary="a phase of one rank exceeds that of the median rank by > share of a step",
        check=check_straggler,
        severity="warning",
        patience=2,
        needs=("ranks",),
        thresholds={
            "share": Threshold(0.1, "excess over the median rank, as a share of a step"),
            "sigmas": Threshold(4, "excess in robust standard deviations over ranks"),
            "min_seconds": Threshold(0.01, "smaller delays per step are ignored"),
            "critical_share": Threshold(0.2, "of a step above which it may become critical"),
            "critical_after": Threshold(20, "observations in a row after which it does"),
        },
        advice=(
            "check that host: other processes, thermal or power throttling, a failing disk",
            "if its data phase is long, check its loader, dataset shard sizes and file system",
            "remove the host from the job and restart from the last checkpoint",
        ),
    ),
    Rule(
        name="throughput_drop",
        summary="tokens/s (or samples/s) below its recent median by > warning, > critical",
        check=check_throughput,
        severity="warning",
        patience=2,
        needs=RATES,
        thresholds={
            "warning": Threshold(0.5, "lost share of the throughput: warning"),
            "critical": Threshold(0.8, "lost share of the throughput: critical"),
            "window": Threshold(20, "observations of the recent median"),
            "armed_after": Threshold(5, "observations before the first evaluation"),
            "min_step_seconds": Threshold(0.01, "shorter steps are not evaluated"),
        },
        advice=(
            "compare the phase times with the last healthy record: which one grew?",
            "look for a straggler and for throttled devices",
            "check whether other jobs load the file system and the network",
        ),
    ),
    Rule(
        name="step_time_jitter",
        summary="mean step time since the last record > factor x its recent median",
        check=check_jitter,
        severity="info",
        patience=2,
        needs=(STEP,),
        thresholds={
            "factor": Threshold(2, "times the recent median"),
            "window": Threshold(20, "observations of the recent median"),
            "armed_after": Threshold(5, "observations before the first evaluation"),
            "min_step_seconds": Threshold(0.01, "shorter steps are not evaluated"),
        },
        advice=(
            "evaluation and checkpointing between two records count: expect one alert after each",
            "look for garbage collection, memory allocator retries, or other jobs on the host",
        ),
    ),
    Rule(
        name="dataloader_bound",
        summary="share of a step spent waiting for data > warning, > critical",
        check=check_data,
        severity="warning",
        patience=3,
        needs=(DATA,),
        thresholds={
            "warning": Threshold(0.1, "share of a step: warning"),
            "critical": Threshold(0.2, "share of a step: critical"),
            "min_step_seconds": Threshold(0.01, "shorter steps are not evaluated"),
        },
        advice=(
            "use more loader workers, prefetching and pinned memory",
            "tokenize and decode before training",
            "cache the dataset on a local disk",
        ),
    ),
    Rule(
        name="mfu_invalid",
        summary="MFU above 100%",
        check=check_mfu,
        severity="warning",
        cooldown=100,
        needs=(MFU,),
        advice=(
            "pass step() the tokens of this rank, not those of all ranks",
            "check mfu.flops_per_token or mfu.model, and mfu.peak_flops with its dtype",
        ),
    ),
)

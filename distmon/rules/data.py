"""Data: batches that repeat, ranks that read the same, a rank whose data is unlike the others'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from distmon.record.record import Column, Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold

_SEEN = 32
"""Observations whose batches are remembered."""
_KEPT = 32
"""Observations that a rank's usual loss and gradient are the median of."""


def check_repeats(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a data loader that returns the same batch, or the same few, again and again.

    Hashes are compared at observed steps only: of an epoch that is read in the same order each
    time and divides the interval, every observation has the same batch. So what repeats from the
    start is an info; what began to repeat is a warning.
    """
    hashes = record.ranks.get("batch_hash")
    if hashes is None:
        return
    now = [float(h) if np.isfinite(h) else -1.0 for h in hashes]
    last, at, interval = memory.get("last"), memory.get("step", 0), memory.get("interval")
    memory["last"], memory["step"], memory["interval"] = now, record.step, record.step - at
    if interval != record.step - at:
        memory["seen"] = []  # with another interval, observations meet other batches of an epoch
    seen: list[list[float]] = memory.setdefault("seen", [])
    same = [
        rank for rank, (a, b) in enumerate(zip(last or [], now, strict=False)) if a == b and b >= 0
    ]
    varied = len({tuple(each) for each in seen}) >= limits["varied"]
    memory["seen"] = [*seen, now][-_SEEN:]
    if same and varied:
        yield Finding(
            key="repeats",
            message=f"the batch of step {record.step} is the one of step {at}: the data loader "
            f"repeats it on rank {', '.join(map(str, same[:4]))}",
            ranks=tuple(same),
            measured=float(len(same)),
        )
    elif found := _repeats_from_the_start(memory["seen"], limits):
        yield found


def _repeats_from_the_start(seen: list[list[float]], limits: Limits) -> Finding | None:
    """Return the finding of a run that has seen only a few batches in many observations."""
    known = [first for first, *_ in seen if first >= 0]
    different = len(set(known))
    if len(known) < limits["observations"] or different > limits["few"]:
        return None
    if different * limits["times"] > len(known):
        return None
    which = "the same batch" if different == 1 else f"only {different} different batches"
    return Finding(
        key="few",
        message=f"the last {len(known)} observations had {which}: the data is that small, its "
        "epochs are never shuffled, the inputs are constant, or the data loader starts again and "
        "again",
        severity="info",
        measured=float(different),
        threshold=limits["few"],
        once=True,
    )


def check_shared(
    record: Record,
    limits: Limits,  # noqa: ARG001
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """Find data-parallel ranks that got the same batch."""
    hashes, whole = record.ranks.get("batch_hash"), record.ranks.get("holds_all")
    if hashes is None or whole is None or len(hashes) < 2 or not (whole > 0).all():
        return  # ranks that hold parts of a parameter may have to read the same data
    known = hashes[np.isfinite(hashes)]
    values, counts = np.unique(known, return_counts=True)
    if counts.size and counts.max() > 1:
        ranks = np.flatnonzero(hashes == values[counts.argmax()])
        yield Finding(
            key="shared",
            message=f"{len(ranks)} of {len(hashes)} ranks trained on the same batch at step "
            f"{record.step}: ranks {', '.join(map(str, ranks[:6]))}",
            ranks=tuple(int(rank) for rank in ranks),
            measured=float(len(ranks)),
            threshold=1.0,
        )


def check_outlier(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a rank whose loss or gradient left the others', compared with its own past.

    Or whose loss does not come down while theirs does, as of labels that belong to other inputs.
    """
    yield from _without_progress(record, limits, memory)
    for what, words in (("loss", "loss"), ("local_grad_norm", "gradient norm")):
        now = record.ranks.get(what)
        if now is None or len(now) < 2 or not np.isfinite(now).all() or (now <= 0).any():
            continue
        past = memory.setdefault(what, [])
        if len(past) >= limits["history"]:
            usual = np.median(np.array(past), axis=0)
            growth = now / usual
            worst = int(np.argmax(growth))
            others = _rest(growth, worst)
            factor = float(growth[worst] / others)
            apart = factor > limits["factor"] and now[worst] > limits["factor"] * _rest(now, worst)
            # Of a loss near zero a factor is noise: it has to be high for the run, too.
            if apart and now[worst] > limits["above"] * np.max(past):
                yield Finding(
                    key=f"{what} {worst}",
                    group=f"rank {worst}",
                    message=f"the {words} of rank {worst} is {now[worst]:.3g}, "
                    f"{now[worst] / _rest(now, worst):.1f}x that of the other ranks; usually it "
                    f"is {usual[worst]:.3g}",
                    ranks=(worst,),
                    measured=factor,
                    threshold=limits["factor"],
                )
                continue  # the usual values are those from before
        memory[what] = [*past, now.tolist()][-_KEPT:]


def _without_progress(record: Record, limits: Limits, memory: Memory) -> Iterator[Finding]:
    """Find the rank that has made hardly any of the progress that the others made.

    All ranks hold the same weights, so what one batch can be from another is all that may differ.
    Ranks that read another domain have another loss, but theirs falls, too.
    """
    now, start = record.ranks.get("loss"), record.history.start
    if now is None or len(now) < 2 or not np.isfinite(now).all() or start is None:
        return
    last = [*memory.get("last_losses", []), now.tolist()][-int(limits["observations"]) :]
    first = memory.setdefault("first_losses", now.tolist())
    memory["last_losses"] = last
    if len(last) < limits["observations"] or len(first) != len(now):
        return
    if record.history.need_not_fall(record):
        return
    losses, begun = np.array(last), np.maximum(first, start)
    progress = begun - np.median(losses, axis=0)
    worst = int(np.argmin(progress))
    others = _rest(progress, worst)
    apart = all(float(each[worst] - _rest(each, worst)) > 0 for each in losses)
    # What the others have learned has to be more than chance, and the gap between them, too.
    chance = max(0.1 * abs(start), 6 * record.history.noise)
    if apart and others > chance and progress[worst] < limits["progress"] * others:
        yield Finding(
            key=f"progress {worst}",
            group=f"rank {worst}",
            message=f"the loss of rank {worst} is {now[worst]:.3g}, that of the other ranks "
            f"{_rest(now, worst):.3g}: it has hardly come down from {begun[worst]:.3g}, while "
            "theirs has; its labels may not belong to its inputs",
            ranks=(worst,),
            measured=float(progress[worst] / others),
            threshold=limits["progress"],
        )


def _rest(values: Column, without: int) -> float:
    return float(np.median(np.delete(values, without)))


RULES = (
    Rule(
        name="batch_repeats",
        summary="the hash of a rank's batch is that of the observation before, which it was not "
        "earlier in the run; an info for the same few hashes since the start",
        check=check_repeats,
        severity="warning",
        patience=2,
        cooldown=30,
        needs=("ranks.batch_hash",),
        thresholds={
            "varied": Threshold(3, "different batches before one that repeats is news"),
            "observations": Threshold(10, "before the same few since the start are an info"),
            "few": Threshold(4, "different batches"),
            "times": Threshold(3, "that each was seen on average"),
        },
        advice=(
            "check the data loader: an iterator that is created anew in each step, a worker that "
            "ended, a sampler whose seed is reset",
            "for data that has to repeat set batch_hash: false",
        ),
    ),
    Rule(
        name="ranks_share_data",
        summary="data-parallel ranks have equal hashes of their batches",
        check=check_shared,
        severity="warning",
        needs=("ranks.batch_hash",),
        patience=2,
        cooldown=30,
        advice=(
            "give each rank its own part of the data: a DistributedSampler with set_epoch, or a "
            "seed that contains the rank",
            "for ranks that have to read the same data set batch_hash: false",
        ),
    ),
    Rule(
        name="rank_outlier",
        summary="loss or gradient norm of one rank > factor times the others', and it was not so "
        "before; or its loss has not come down while theirs has",
        check=check_outlier,
        severity="warning",
        patience=2,
        cooldown=30,
        thresholds={
            "factor": Threshold(3.0, "times the other ranks"),
            "above": Threshold(1.0, "times the highest value of any rank lately"),
            "history": Threshold(3, "observations before ranks are compared"),
            "progress": Threshold(0.25, "of the others' progress since the start"),
            "observations": Threshold(4, "whose median loss is the progress of a rank"),
        },
        advice=(
            "inspect the data that this rank reads: a corrupt file or shard, another preprocessing",
            "if its data is fine, test the device of this rank",
        ),
    ),
)

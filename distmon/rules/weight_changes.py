"""Weights that were replaced, that collapse, or of which a few rows explode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import Column, Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.layer_stacks import fingerprint
from distmon.rules.pruning import pruned as pruned_now
from distmon.rules.second_sign import FEWEST_LOSSES, LOST, NOISE, lost_progress

_SAME_RATE: Final = 2.0
"""Rates closer than this factor make updates of about the same size."""
_FORGOTTEN: Final = 0.7
"""Share of the largest update that is kept from one observation to the next."""
_TWICE: Final = 2
_RECENT: Final = 32
"""Steps whose largest loss is usual."""
_FEW: Final = 3.5
"""Elements of a vector whose gradient may be near zero by chance where it is observed."""


def check_replaced(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a matrix or a vector that changed by more than its updates can have done.

    The learning rate of the steps between is not known: updates may have been as large as at the
    observation before. Where the rate has changed a lot since, they may have had any size.
    """
    before, at = _updates_before(record, memory)
    pruned = pruned_now(record).matrices
    if len(memory.get("pruned", ())) == len(pruned) > 0:
        pruned = pruned | np.array(memory["pruned"], dtype=bool)  # what is pruned will be again
    memory["pruned"] = pruned.tolist()
    lost = lost_progress(record)
    if lost == 0.0:
        memory["replaced"] = dict.fromkeys(memory.get("replaced", {}), True)
    vector = _replaced_vector(record, limits, memory)
    rate, rate_before = record.metrics.get("train/lr"), memory.get("lr")
    memory["lr"] = rate
    if rate and rate_before and not 1 / _SAME_RATE < rate / rate_before < _SAME_RATE:
        return
    if record.nonfinite is not None:
        return  # before a NaN, updates have any size
    matrix = _replaced_matrix(record, limits, before, at, pruned)
    # Where matrices are replaced, a vector that is replaced with them is no news.
    memory["matrices"] = bool(memory.get("matrices") or matrix)
    finding = matrix if memory["matrices"] else vector
    watched = memory.pop("watched", None)
    if finding:
        yield from _again(finding, record, memory)
    elif watched and (lost or 0.0) > LOST:
        yield replace(Finding(**watched), params=(watched["key"],), is_new=True)


def _again(finding: Finding, record: Record, memory: Memory) -> Iterator[Finding]:
    """Warn of the first time; the run has recovered from it, so a second one is most likely meant.

    A schedule of resets is named once more, as an info, and then no longer. Where the loss does not
    notice, as of an adapter that is merged, it is an info; the next observation may tell.
    """
    recovered: dict[str, bool] = memory.setdefault("replaced", {})
    times: dict[str, int] = memory.setdefault("times", {})
    name = finding.key
    times[name] = times.get(name, 0) + 1
    if not recovered.get(name):
        recovered[name] = False
        harmless = _unnoticed(record)
        if harmless:
            memory["watched"] = {"key": name, "message": finding.message}
        yield replace(finding, severity="info" if harmless else None)
    elif times[name] == _TWICE and not _unnoticed(record):
        yield replace(
            finding,
            key=f"{name} again",
            message=f"{finding.message}, as before, and the run had recovered from that",
            severity="info",
        )


def _unnoticed(record: Record) -> bool:
    """Return whether no loss since the last record is above those before, in a run that learns."""
    history, losses = record.history, [*record.losses.values()]
    if not losses or not history.has_fallen or len(history.losses) < FEWEST_LOSSES:
        return False
    recent = [*history.losses][-_RECENT:]
    return max(losses) <= max(recent) + NOISE * history.noise


def _replaced_matrix(
    record: Record, limits: Limits, before: Column | None, at: int, pruned: NDArray[np.bool_]
) -> Finding | None:
    """Return the matrix whose sample went farther than its updates explain."""
    jump = record.ranks.get("weight_jump")
    if jump is None or not np.isfinite(jump).any():
        return None
    rank = int(np.nanargmax(jump))
    expected = float(record.ranks["weight_jump_expected"][rank])
    row = int(record.ranks["weight_jump_row"][rank])
    if not 0 <= row < len(record.params) or pruned[row]:
        return None
    norm = float(record.params.columns["weight_norm"][row])
    if before is not None and norm > 0:
        expected = max(expected, (record.step - at) * float(before[row]) / norm)
    change = float(jump[rank])
    if change > limits["change"] and change > limits["factor"] * expected:
        return _replaced(record.params.names[row], change, expected, limits["factor"])
    return None


def _replaced_vector(record: Record, limits: Limits, memory: Memory) -> Finding | None:
    """Return the vector whose mean and standard deviation moved farther than its updates explain.

    Every element of a vector is read, and its distance is at least what these two moved by: root
    of the elements x their hypotenuse. Updates may have been as large as the largest lately.
    """
    c, names = record.params.columns, fingerprint(record.params.names)
    then = memory.get("vectors") if memory.get("vectors_of") == names else None
    steps = record.step - memory.get("vectors_step", 0)
    rows = np.flatnonzero(c["ndim"] < 2)
    now = {name: np.nan_to_num(c[f"weight_{name}"][rows]) for name in ("mean", "std", "norm")}
    update = np.nan_to_num(c["update_norm"][rows])
    if then is not None:
        update = np.maximum(update, _FORGOTTEN * np.array(then["update"]))
    memory["vectors_of"], memory["vectors_step"] = names, record.step
    memory["vectors"] = {
        name: column.tolist() for name, column in (now | {"update": update}).items()
    }
    memory["vectors_seen"] = memory.get("vectors_seen", 0) + 1 if then else 0
    if then is None or memory["vectors_seen"] < limits["history"]:
        return None
    past = {name: np.array(then[name]) for name in now}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        larger = [np.where(now["norm"] > past["norm"], now[each], past[each]) for each in now]
        mean, std, norm = larger
        elements = norm**2 / (mean**2 + std**2)
        moved = np.hypot(now["mean"] - past["mean"], now["std"] - past["std"])
        change, expected = np.sqrt(elements) * moved / norm, steps * update / norm
        trained = (c["requires_grad"] > 0) & (c["in_optimizer"] > 0)
        beyond = change / expected
        replaced = trained[rows] & (change > limits["vector_change"]) & (elements > _FEW)
        replaced &= (beyond > limits["vector_factor"]) & np.isfinite(beyond)
    if not replaced.any():
        return None
    worst = int(np.argmax(np.where(replaced, beyond, 0.0)))
    name = record.params.names[rows[worst]]
    return _replaced(name, float(change[worst]), float(expected[worst]), limits["vector_factor"])


def _replaced(name: str, change: float, expected: float, limit: float) -> Finding:
    return Finding(
        key=name,
        message=f"{name} changed by {change:.0%} of its norm since the last observation, but "
        f"its updates explain at most {expected:.1%}: its weights were replaced",
        params=(name,),
        measured=change / max(expected, 1e-12),
        threshold=limit,
        is_new=True,
    )


def _updates_before(record: Record, memory: Memory) -> tuple[Column | None, int]:
    """Return the largest update norms lately and the step before, and keep those of this."""
    names = fingerprint(record.params.names)
    updates = record.params.columns["update_norm"]
    then, at = memory.get("updates"), memory.get("step", 0)
    same = memory.get("names") == names and then is not None
    memory["names"], memory["step"] = names, record.step
    updates = np.where(np.isfinite(updates), updates, 0.0)
    past = np.array(then) if same else None
    if past is not None:
        updates = np.maximum(updates, _FORGOTTEN * past)
    memory["updates"] = updates.tolist()
    return past, at


def check_collapse(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find matrices whose norm falls to a small share of the largest that they had.

    While the loss falls, or stays at its best, it is an info: weights that are regularized or
    pruned shrink a lot, and a loss that has come down says that they can.
    """
    c, names = record.params.columns, record.params.names
    norms = np.where(np.isfinite(c["weight_norm"]), c["weight_norm"], 0.0)
    same = memory.get("names") == fingerprint(names)
    peak = np.maximum(np.array(memory["peak"]), norms) if same else norms
    memory["names"], memory["peak"] = fingerprint(names), peak.tolist()
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(peak > 0, norms / peak, 1.0)
        fallen = (share < limits["share"]) & (c["ndim"] >= 2) & (c["requires_grad"] > 0)
    rows = np.flatnonzero(fallen & (c["update_ratio"] > 0))
    if not rows.size:
        return
    i, history = int(rows[np.argmin(share[rows])]), record.history
    # Of a loss that has risen above its noise, or never came down, the weights are to blame.
    harmless = history.falls or (history.has_fallen and lost_progress(record) == 0.0)
    yield Finding(
        key="collapse",
        message=f"the norms of {len(rows)} matrices collapse: that of {names[i]} has fallen to "
        f"{norms[i]:.3g}, {share[i]:.0%} of its {peak[i]:.3g} (limit {limits['share']:.0%})"
        f"{'' if harmless else ', and the loss no longer falls'}",
        severity="info" if harmless else None,
        params=tuple(names[row] for row in rows),
        measured=float(share[i]),
        threshold=limits["share"],
    )


def check_rows(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a matrix whose largest element grows fast and leaves the others behind.

    A table that starts near zero grows by any factor, but slower and slower: what explodes has
    grown by `lately` since the observation before, too.
    """
    c, names = record.params.columns, record.params.names
    largest = np.where(np.isfinite(c["weight_absmax"]), c["weight_absmax"], 0.0)
    same = memory.get("names") == fingerprint(names)
    past = [*(memory["past"] if same else []), largest.tolist()][-int(limits["window"]) - 1 :]
    memory["names"], memory["past"] = fingerprint(names), past
    then = np.min(np.array(past), axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = largest / np.hypot(c["weight_std"], c["weight_mean"])
        growth = np.where(then > 0, largest / then, 0.0)
        lately = largest > limits["lately"] * np.array(past[-2:][0])
        apart = (growth > limits["growth"]) & (peak > limits["peak"]) & (c["ndim"] >= 2) & lately
    rows = np.flatnonzero(apart)
    for i in rows[np.argsort(-growth[rows], kind="stable")]:
        yield Finding(
            key=names[i],
            message=f"the largest element of {names[i]} grew {growth[i]:.1f}x in at most "
            f"{limits['window']:g} observations and is {peak[i]:.0f}x its root mean square: some "
            "of its rows explode",
            params=(names[i],),
            measured=float(growth[i]),
            threshold=limits["growth"],
        )


def _combine_messages(findings: Sequence[Finding]) -> str:
    others = name_some([f.key for f in findings[1:]])
    return findings[0].message + (f"; also {others}" if others else "")


RULES = (
    Rule(
        name="weights_replaced",
        summary="relative change of a matrix since the last observation > change and > factor "
        "times steps x update ratio; of a vector, vector_change and vector_factor",
        check=check_replaced,
        severity="warning",
        thresholds={
            "change": Threshold(0.6, "relative change that can be a replacement"),
            "factor": Threshold(1.8, "times what its updates explain"),
            "vector_change": Threshold(0.3, "relative change of a vector, at least"),
            "vector_factor": Threshold(3.0, "times what the updates of a vector explain"),
            "history": Threshold(2, "observations whose updates of vectors are known"),
        },
        advice=(
            "find what writes to it: a second initialization, a checkpoint that is loaded in the "
            "run, an average of weights that is copied back",
            "if it is intended (a new head, a reset of dead units), ignore this alert",
        ),
    ),
    Rule(
        name="weight_collapse",
        summary="norm of a trained matrix < share of its largest so far; an info while the loss "
        "falls",
        check=check_collapse,
        severity="warning",
        patience=2,
        cooldown=30,
        needs=("params",),
        thresholds={"share": Threshold(0.2, "of its largest norm")},
        advice=(
            "lower the weight decay: lr x weight_decay is the share that a step takes away",
            "check that weight decay is not applied twice (in the loss and in the optimizer)",
        ),
    ),
    Rule(
        name="exploding_rows",
        summary="largest element of a matrix > growth times its value in the window, and > peak "
        "times the root mean square",
        check=check_rows,
        combine_messages=_combine_messages,
        severity="warning",
        patience=2,
        cooldown=30,
        needs=("params",),
        thresholds={
            "growth": Threshold(8.0, "times its lowest value in the window"),
            "peak": Threshold(6.0, "times the root mean square"),
            "window": Threshold(10, "observations"),
            "lately": Threshold(1.3, "times its value at the observation before"),
        },
        advice=(
            "look at the rows with the largest norm: tokens or items that are in every batch, "
            "padding that gets a gradient",
            "set padding_idx, or give the table a weight decay or a norm limit of its own",
        ),
    ),
)

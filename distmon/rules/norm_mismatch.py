"""A gradient norm that the trainer reports and clips with, but that is not the true one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distmon.record.record import Record
from distmon.rules.advice import applied_norm
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric

REPORTED = "train/unclipped_grad_norm"


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the reported norm between ranks, and with the gradients that were applied.

    Clipping only makes gradients smaller: applied gradients above the reported norm prove that it
    is too small. A constant factor between both, while both vary, is no clipping either.
    """
    reported, (applied, error) = metric(record, REPORTED), _stepped_norm(record)
    if (record.ranks.get("norm_reports", np.ones(1)) > 1).any():
        return  # one norm for each optimizer, none of which is the total
    ranks = record.ranks.get("reported_grad_norm", np.zeros(0))
    ranks = ranks[np.isfinite(ranks)]
    if len(ranks) > 1 and ranks.max() > (1 + limits["tolerance"]) * ranks.min() > 0:
        low, high = int(ranks.argmin()), int(ranks.argmax())
        yield Finding(
            key="ranks",
            message=f"ranks report different gradient norms: rank {high} {ranks[high]:.4g}, rank "
            f"{low} {ranks[low]:.4g}; each clips by another factor",
            ranks=(low,),
            measured=float(ranks.max() / ranks.min()),
            threshold=1 + limits["tolerance"],
        )
        return
    if reported is None or applied is None or reported <= 0 or applied <= 0:
        return
    if applied - 2 * error > (1 + limits["tolerance"]) * reported:
        yield _finding(applied / reported, reported, applied, limits)
        return
    size = int(limits["window"])
    past = [*memory.get("pairs", []), [reported, applied]][-size:]
    memory["pairs"] = past
    pairs = np.array(past)
    factors, spread = pairs[:, 1] / pairs[:, 0], pairs.max(0) / pairs.min(0)
    steady = factors.max() < (1 + limits["steady"]) * factors.min()
    if len(past) == size and steady and spread.min() > 1 + limits["varied"]:
        factor = float(np.median(factors))
        if factor < 1 - limits["tolerance"]:
            yield _finding(factor, reported, applied, limits)


def _stepped_norm(record: Record) -> tuple[float | None, float]:
    """Return the norm of the gradients of what the optimizers step, and its standard error.

    A frozen backbone may keep gradients of an earlier training, and a parameter that no optimizer
    has may get one; neither belongs to the norm that a trainer clips with.
    """
    total, error = applied_norm(record)
    c = record.params.columns
    stepped = (c["in_optimizer"] > 0) & (c["requires_grad"] > 0) & (c["has_grad"] > 0)
    if total is None or stepped.all() or not stepped.any():
        return total, error
    return float(np.sqrt(np.nansum(c["grad_norm"][stepped] ** 2))), error


def _finding(factor: float, reported: float, applied: float, limits: Limits) -> Finding:
    return Finding(
        key="factor",
        message=f"the trainer reports a gradient norm of {reported:.4g}, but the gradients that "
        f"the optimizer applied have {applied:.4g}, {factor:.3g}x as much: the reported norm is "
        "not theirs",
        measured=factor,
        threshold=1 + limits["tolerance"],
    )


RULES = (
    Rule(
        name="norm_mismatch",
        summary="reported gradient norm below that of the applied gradients, different on ranks, "
        "or off by a constant factor",
        check=check,
        severity="warning",
        patience=3,
        cooldown=30,
        needs=(REPORTED,),
        thresholds={
            "tolerance": Threshold(0.1, "relative difference that is accepted"),
            "window": Threshold(8, "observations over which a constant factor is looked for"),
            "steady": Threshold(0.02, "relative spread of a factor that counts as constant"),
            "varied": Threshold(0.1, "relative spread of the norms that shows they vary"),
        },
        advice=(
            "where parameters are sharded over ranks, the norm may still be partial: call "
            ".full_tensor() on it before clipping",
            "with a GradScaler call scaler.unscale_(optimizer) before the norm is computed",
            "compute it over all parameters that the optimizer steps, after the last backward",
        ),
    ),
)

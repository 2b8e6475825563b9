"""Mistakes in the training loop: gradients kept, backward run twice, layers left in eval mode."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distmon.record.record import Column, Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold, metric


def rank_values(record: Record, name: str) -> Column:
    """Return a rank metric of the ranks that have it."""
    values = record.ranks.get(name, np.zeros(0))
    return values[np.isfinite(values)]


def check_stale(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find gradients of earlier steps that were not cleared before the first backward pass."""
    stale, local = rank_values(record, "stale_grad_norm"), rank_values(record, "local_grad_norm")
    if not stale.size or not local.size or metric(record, "train/skipped_steps"):
        return  # gradients that are kept over a skipped step are an accumulation
    before, now = float(stale.max()), float(local.max())
    if before > limits["share"] * now and before > 0:
        yield Finding(
            key="stale",
            message=f"gradients of earlier steps were still there when backward began: their norm "
            f"is {before / now if now else float('inf'):.2g}x that of this step",
            measured=before / now if now else float("inf"),
            threshold=limits["share"],
        )


def check_repeated(
    record: Record,
    limits: Limits,  # noqa: ARG001
    memory: Memory,  # noqa: ARG001
) -> Iterable[Finding]:
    """Find backward passes that gave the same gradients as the one before."""
    repeated = rank_values(record, "repeated_backward")
    passes, forwards = (rank_values(record, f"{way}_passes") for way in ("backward", "forward"))
    if repeated.size and repeated.max() > 0 and passes.size:
        calls = f" and {forwards.max():.0f} forward" if forwards.size else ""
        yield Finding(
            key="repeated",
            message=f"backward ran {passes.max():.0f} times in one step on the same loss: there "
            f"were {passes.max():.0f} backward{calls} passes, and two of them gave the same "
            "gradients",
            measured=float(passes.max()),
            threshold=1.0,
        )


def check_mode(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find BatchNorm and Dropout layers in eval mode during the training forward."""
    layers, total = rank_values(record, "eval_layers"), rank_values(record, "mode_layers")
    if not layers.size or not total.size:
        return
    count, before = float(layers.max()), memory.get("least")
    if count == 0 and before is None:
        memory["least"] = 0.0
        return
    memory["least"] = count if before is None else min(before, count)
    if count <= memory["least"] and (before is not None or count < total.max()):
        return  # some layers are kept in eval mode on purpose
    row = int(rank_values(record, "eval_layer_row").max())
    name = record.params.names[row] if 0 <= row < len(record.params) else ""
    since = "since the start" if before is None else "although they were in train mode before"
    yield Finding(
        key="mode",
        message=f"{count:.0f} of {total.max():.0f} BatchNorm and Dropout layers are in eval mode "
        f"during the training forward, {since}",
        params=(name,) if name else (),
        severity="info" if before is None else None,
        measured=count,
        threshold=memory["least"],
    )


RULES = (
    Rule(
        name="stale_gradients",
        summary="gradients before the first backward pass > share of this step's, on unskipped "
        "steps",
        check=check_stale,
        severity="warning",
        needs=("ranks.stale_grad_norm",),
        patience=2,
        cooldown=30,
        thresholds={"share": Threshold(1e-3, "of the norm that this step's backward adds")},
        advice=(
            "call optimizer.zero_grad() once per step, before backward",
            "if gradients are accumulated on purpose, call monitor.step() once per optimizer step",
        ),
    ),
    Rule(
        name="backward_repeated",
        summary="two backward passes of one step gave equal gradients",
        check=check_repeated,
        severity="warning",
        needs=("ranks.repeated_backward",),
        patience=2,
        cooldown=30,
        advice=(
            "remove the second call of backward (look for retain_graph=True)",
            "if micro-batches are accumulated, check that each is another batch",
        ),
    ),
    Rule(
        name="eval_mode",
        summary="more BatchNorm or Dropout layers in eval mode during training than before",
        check=check_mode,
        severity="warning",
        needs=("ranks.mode_layers",),
        cooldown=30,
        advice=(
            "call model.train() after each evaluation",
            "if layers are kept in eval mode on purpose, do it before the first step",
        ),
    ),
)

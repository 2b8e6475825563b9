"""Spectral norms: one matrix that grows away from the others."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import numpy as np

from distmon.record.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold
from distmon.rules.inside_history import remember

_KIND = "spectra"


def check_growth(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find matrices whose spectral norm grows much faster than that of the others.

    A matrix that began near zero, as the last one of a residual branch may, is compared with the
    median of all: it may grow up to there.
    """
    if (table := record.inside.get(_KIND)) is None:
        return
    errors = dict(zip(table.names, table.columns["spectral_norm_error"].tolist(), strict=True))
    window = int(limits["window"])
    series = remember(memory, table, "spectral_norm", window)
    # Of all matrices, also of those that were not their turn.
    typical = float(np.median([values[-1] for values in memory["spectral_norm"].values()]))
    growth = {}
    for name, (before, now) in series.items():
        if len(before) < limits["min_records"] or not isfinite(now):
            continue
        then = max(before[0], typical)
        growth[name] = now / then if then > 0 else 1.0
    if not growth:
        return
    usual = float(np.median([*growth.values()])) if len(growth) > 2 else 1.0
    for name, factor in growth.items():
        before, now = series[name]
        sure = now - 2 * errors[name] > limits["growth"] * max(before[0], typical)
        if sure and factor > limits["growth"] * max(usual, 1.0) and now >= before[-1]:
            yield Finding(
                key=name,
                group="growth",
                params=(name,),
                message=f"the spectral norm of {name} is {now:.3g}, {now / before[0]:.3g}x that of "
                f"{len(before)} measurements ago; the median of all matrices is {typical:.3g}",
                measured=factor,
                threshold=limits["growth"],
                once=True,
            )


RULES = (
    Rule(
        name="spectral_growth",
        summary="spectral norm of one matrix > growth x its past, and the median of all matrices",
        check=check_growth,
        severity="warning",
        patience=2,
        needs=("inside/spectral_norm_max",),
        thresholds={
            "growth": Threshold(3.0, "times the norm at the begin of the window"),
            "window": Threshold(16, "measurements that are remembered"),
            "min_records": Threshold(3, "measurements before anything is compared"),
        },
        advice=(
            "lower the learning rate of this layer, or raise its weight decay",
            "normalize the input of this layer, or use spectral normalization",
            "check the data: one feature of large scale grows one direction of the weight",
        ),
        combine_messages=lambda findings: "; ".join(f.message for f in findings[:3]),
    ),
)

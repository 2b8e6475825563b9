"""Activations: dead units, saturation, explosion, and representations that collapse."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distmon.record.record import Record
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold, name_some
from distmon.rules.inside_history import remember, usual
from distmon.rules.second_sign import second_sign

_KIND = "activations"


def check_dead(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find layers most of whose units are zero at every position that was seen."""
    if (table := record.inside.get(_KIND)) is None:
        return
    for i, name in enumerate(table.names):
        dead, positions = (float(table.columns[c][i]) for c in ("dead_fraction", "positions"))
        units = float(table.columns["units"][i])
        if positions < limits["min_positions"] or units < limits["min_units"]:
            continue
        if not dead > limits["fraction"] * (1 - MARGIN):
            continue
        yield Finding(
            key=name,
            group="dead",
            layers=(name,),
            message=f"{dead:.0%} of the {units:.0f} units of {name} were zero at all "
            f"{positions:.0f} positions of the last measurements (limit {limits['fraction']:.0%})",
            measured=dead,
            threshold=limits["fraction"],
            fading=dead <= limits["fraction"],
            once=True,
        )


def check_saturated(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find bounded activations inside the model that are mostly at their bounds."""
    if (table := record.inside.get(_KIND)) is None:
        return
    for i, name in enumerate(table.names):
        share = float(table.columns["saturated_fraction"][i])
        if not share > limits["fraction"] * (1 - MARGIN):
            continue
        yield Finding(
            key=name,
            group="saturated",
            layers=(name,),
            message=f"{share:.0%} of the outputs of {name} are at the bounds of the function, "
            f"where its gradient vanishes (limit {limits['fraction']:.0%})",
            measured=share,
            threshold=limits["fraction"],
            fading=share <= limits["fraction"],
            once=True,
        )


def check_explosion(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find activations far above their own past.

    Alone it is an info: activations of a healthy run grow too while it learns. With a second sign,
    or from `alone` on, it is a warning.
    """
    if (table := record.inside.get(_KIND)) is None:
        return
    found = []
    for name, (before, now) in remember(memory, table, "rms", int(limits["window"])).items():
        if len(before) < limits["min_records"] or usual(before) <= 0 or np.isnan(now):
            continue
        growth = now / usual(before)
        if growth > limits["growth"]:
            found.append((growth, name, now, usual(before)))
    if not found:
        return
    growth, name, now, before_now = max(found)
    sign = second_sign(record)
    largest = [each[1] for each in sorted(found, reverse=True)]
    yield Finding(
        key="rms",
        layers=tuple(_first_in_order(table.names, largest)),
        message=f"the activations of {name} have an rms of {now:.3g}, {growth:.3g}x their median "
        f"of {before_now:.3g} in the measurements before (limit {limits['growth']:g}x); "
        f"also above it: {name_some(largest[1:], 3) or 'none'}{f'; {sign}' if sign else ''}",
        severity="warning" if sign or growth > limits["alone"] else "info",
        measured=growth,
        threshold=limits["growth"],
    )


def check_collapse(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find layers whose output no longer depends on the input; what follows them does not either.

    The spread is the share of the squared norm that differs from position to position. It has to be
    small, and small against what it was. Alone it is an info: many models output the mean of their
    targets before they learn more. It is a warning when a constant output solves the objective,
    that is, the loss has nearly vanished, and when it stays.
    """
    if (table := record.inside.get(_KIND)) is None:
        return
    widths = dict(zip(table.names, table.columns["units"].tolist(), strict=True))
    best: dict[str, float] = memory.setdefault("best", {})
    low: dict[str, int] = memory.setdefault("low", {})
    left = _share_of_loss_left(record)
    for name, spread in zip(table.names, table.columns["spread"].tolist(), strict=True):
        if np.isnan(spread) or widths[name] < limits["min_units"]:
            continue
        top = best[name] = max(best.get(name, 0.0), spread)
        if not (spread < limits["spread"] and spread < limits["of_best"] * top):
            low.pop(name, None)
            continue
        low[name] = low.get(name, 0) + 1
        sign = ""
        if left < limits["loss_left"]:
            sign = f"; the loss is at {left:.1%} of its start: a constant output solves it"
        elif low[name] >= limits["persistent"]:
            sign = f"; it has been so for {low[name]} measurements"
        yield Finding(
            key=name,
            group="collapse",
            layers=(name,),
            severity="warning" if sign else "info",
            message=f"the output of {name} is nearly the same at all positions: only "
            f"{spread:.2%} of its squared norm varies with the input, {top:.0%} at best "
            f"before{sign}",
            measured=spread,
            threshold=limits["spread"],
            once=True,
        )


def _share_of_loss_left(record: Record) -> float:
    """Return the loss of this record as a share of where it started; 1 when it cannot be said."""
    start = record.history.start
    losses = [loss for loss in record.losses.values() if np.isfinite(loss)]
    if not losses or start is None or start <= 0 or min(losses) < 0:
        return 1.0
    return float(np.median(losses)) / start


def _first_in_order(names: tuple[str, ...], some: list[str]) -> list[str]:
    """Return a few of the names, first the one that comes first in the model."""
    return [name for name in names if name in some][:3]


_DEAD_ADVICE = (
    "lower the learning rate: one large step can push the bias of most units below zero",
    "initialize the biases of this layer at zero or slightly above, and the weights by He's rule",
    "use LeakyReLU, GELU or SiLU in this layer",
)
RULES = (
    Rule(
        name="dead_units",
        summary="share of units that are zero at every position > fraction",
        check=check_dead,
        severity="warning",
        patience=2,
        needs=("inside/dead_fraction_max",),
        thresholds={
            "fraction": Threshold(0.5, "share of dead units"),
            "min_positions": Threshold(64, "positions in the window before anything follows"),
            "min_units": Threshold(8, "narrower layers are not checked"),
        },
        advice=_DEAD_ADVICE,
        combine_messages=lambda findings: (
            "; ".join(f.message for f in findings[:3])
            + (f"; and {len(findings) - 3} more layers" if len(findings) > 3 else "")
        ),
    ),
    Rule(
        name="saturated",
        summary="share of a bounded activation at its bounds > fraction",
        check=check_saturated,
        severity="warning",
        patience=2,
        needs=("inside/saturated_fraction_max",),
        thresholds={"fraction": Threshold(0.5, "share of saturated outputs")},
        advice=(
            "scale down the weights before this layer, or normalize its input",
            "lower the learning rate; check the scale of the input data",
            "use an activation that does not saturate",
        ),
        combine_messages=lambda findings: "; ".join(f.message for f in findings[:3]),
    ),
    Rule(
        name="activation_explosion",
        summary="rms of an activation > growth x its own median, with a second sign; else an info",
        check=check_explosion,
        severity="warning",
        patience=2,
        needs=("inside/activation_rms_max",),
        thresholds={
            "growth": Threshold(20.0, "times the median of the measurements before"),
            "alone": Threshold(200.0, "growth that is a warning without a second sign"),
            "window": Threshold(16, "measurements that are remembered"),
            "min_records": Threshold(4, "measurements before anything is compared"),
        },
        advice=(
            "lower the learning rate, or lengthen the warmup",
            "normalize the input of the first of the named layers",
            "clip the gradient",
        ),
    ),
    Rule(
        name="representation_collapse",
        summary="share of an activation that varies with the input < spread, and < of_best x its "
        "best, while the loss nearly vanishes or for long; else an info",
        check=check_collapse,
        severity="warning",
        patience=2,
        needs=("inside/activation_rms_max",),
        thresholds={
            "spread": Threshold(0.01, "share of the squared norm that varies"),
            "of_best": Threshold(0.1, "relative to the largest share before"),
            "loss_left": Threshold(0.1, "of the loss at the start: a constant output solves it"),
            "persistent": Threshold(12, "measurements after which it is a warning by itself"),
            "min_units": Threshold(4, "narrower layers are not checked"),
        },
        advice=(
            "self-supervised: check the stop-gradient, the predictor and the target's momentum",
            "add a variance or a contrastive term, or BatchNorm in the projector",
            "supervised: lower the learning rate; check that inputs and labels belong together",
        ),
        combine_messages=lambda findings: "; ".join(f.message for f in findings[:3]),
    ),
)

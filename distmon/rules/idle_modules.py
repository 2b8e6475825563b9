"""Modules that rest while others of their kind are used: experts without tokens, skipped blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from distmon.record.record import ParamTable
from distmon.rules.base import Finding, Limits, Memory

_MATRICES: Final = 2
"""Of a module that is one of many alike; one of fewer may be a link of a chain."""
_ADVICE_IDLE = (
    "if these are experts, raise the weight of the balancing loss; distmon's inside: experts shows "
    "where the tokens go",
    "if they are skipped or trained later on purpose, ignore this alert",
)


def idle_modules(table: ParamTable) -> list[str]:
    """Return the collection of each parameter whose whole module rests while its like are used.

    `layer.experts` for an expert of `layer.experts.3` that got no token: none of its parameters has
    a gradient, but those of another expert have one. A module of fewer than two matrices may be a
    link of a chain. Empty for the others.
    """
    c = table.columns
    with np.errstate(invalid="ignore"):
        without = (c["has_grad"] == 0) | (c["grad_zero_fraction"] == 1)
    found = [""] * len(table)
    if not without.any() or without.all():
        return found
    modules: dict[tuple[str, str], list[int]] = {}
    for i, name in enumerate(table.names):
        parts = name.split(".")
        for at, part in enumerate(parts):
            if at and part.isdigit():
                modules.setdefault((".".join(parts[:at]), part), []).append(i)
    used = {prefix for (prefix, _), rows in modules.items() if not without[rows].any()}
    for (prefix, _), rows in modules.items():
        if prefix in used and without[rows].all() and (c["ndim"][rows] >= 2).sum() >= _MATRICES:
            for i in rows:
                found[i] = found[i] or prefix
    return found


def name_idle(
    resting: Mapping[str, Sequence[str]], limits: Limits, memory: Memory
) -> Iterator[Finding]:
    """Say once in a run which collections have modules that are not used."""
    named: list[str] = memory.setdefault("idle", [])
    lasted: dict[str, int] = memory.get("idle_for", {})
    named += [p for p, times in lasted.items() if p not in resting and times >= limits["idle"]]
    memory["idle_for"] = {prefix: lasted.get(prefix, 0) + 1 for prefix in resting}
    for prefix, names in resting.items():
        if prefix in named:
            continue
        yield Finding(
            key=f"idle {prefix}",
            group=f"idle {prefix}",
            message=f"part of {prefix} is not used, while the rest of it learns",
            params=tuple(names),
            advice=_ADVICE_IDLE,
            severity="info",
            measured=0.0,
            threshold=limits["ratio"],
            once=True,
        )

"""What differs between two runs: settings, versions, ranks, schedule, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from distmon.report.compare.compared_run import ComparedRun
from distmon.report.param_history import NORMS, RATIO

PLACES: Final = ("run_dir", "wandb.name")
"""Settings that say where a run is written and not how it trains."""
COLUMNS: Final = 12
TOP: Final = 10
SAME: Final = 0.01
"""Parameters whose statistics differ by less than 1% are not listed."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    kind: str
    what: str
    first: str
    other: str


@dataclass(frozen=True)
class ParamDifference:
    """How much a statistic of one parameter differs in the second half of the common steps."""

    name: str
    metric: str
    factor: float
    """other / first, median over the observations."""
    first: float
    other: float


def differences(first: ComparedRun, other: ComparedRun) -> list[Difference]:
    """Return everything that differs, training first."""
    found = [*_schedule(first, other)]
    if first.world_size != other.world_size and None not in (first.world_size, other.world_size):
        sizes = str(first.world_size), str(other.world_size)
        found.append(Difference("ranks", "world size", *sizes))
    found += _mapping("setting", first.settings, other.settings)
    found += _mapping("version", first.versions, other.versions)
    if first.shapes and other.shapes:
        found += _mapping("parameter", first.shapes, other.shapes)
    return found


def _schedule(first: ComparedRun, other: ComparedRun) -> list[Difference]:
    """Return what the records say about learning rate, batch and length."""
    facts = [_facts(run) for run in (first, other)]
    return [
        Difference("training", name, facts[0][name], facts[1][name])
        for name in facts[0]
        if name in facts[1] and facts[0][name] != facts[1][name]
    ]


def _facts(run: ComparedRun) -> dict[str, str]:
    facts = {"last step": str(run.last_step)}
    if lr := run.metrics.get("train/lr"):
        facts["highest learning rate"] = f"{max(lr.values()):.3g}"
        facts["last learning rate"] = f"{lr[max(lr)]:.3g}"
    if run.tokens:
        step = max(run.tokens)
        facts["tokens per step"] = f"{run.tokens[step] / max(1, step):.4g}"
    return facts


def _mapping(kind: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    if not a or not b:
        return []
    names = [name for name in dict.fromkeys((*a, *b)) if name not in PLACES]
    return [
        Difference(kind, name, a.get(name, "absent"), b.get(name, "absent"))
        for name in names
        if a.get(name) != b.get(name)
    ]


def param_differences(first: ComparedRun, other: ComparedRun) -> list[ParamDifference]:
    """Return the parameters that differ, by each of three statistics, largest factor first."""
    if first.history is None or other.history is None:
        return []
    found: list[ParamDifference] = []
    for metric in (RATIO, *NORMS):
        tables = [run.history.by_name(metric, COLUMNS) for run in (first, other) if run.history]
        (steps, rows_a), (other_steps, rows_b) = tables
        names = [name for name in rows_a if name in rows_b]
        if not names or not steps or not other_steps:
            continue
        end = min(steps[-1], other_steps[-1])
        at = np.linspace(end / 2, end, COLUMNS // 2)
        for name in names:
            a = np.interp(at, steps, rows_a[name])
            b = np.interp(at, other_steps, rows_b[name])
            good = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
            if good.any():
                factor = float(np.exp(np.median(np.log(b[good] / a[good]))))
                ends = float(np.median(a[good])), float(np.median(b[good]))
                if abs(np.log(factor)) > SAME:
                    found.append(ParamDifference(name, metric, factor, *ends))
    found.sort(key=lambda each: -abs(np.log(each.factor)))
    return found

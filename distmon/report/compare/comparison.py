"""The comparison of one run with the first, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmon.errors import ConfigError
from distmon.report.compare.compared_run import ComparedRun
from distmon.report.compare.differences import (
    Difference,
    ParamDifference,
    differences,
    param_differences,
)
from distmon.report.compare.verdicts import Axis, Compared, common_axis, compare_quantities


@dataclass(frozen=True)
class Comparison:
    """A run against the first run."""

    first: ComparedRun
    other: ComparedRun
    axis: Axis
    quantities: Sequence[Compared]
    differences: Sequence[Difference]
    params: Sequence[ParamDifference]

    def to_dict(self, most_params: int = 10) -> dict[str, Any]:
        """Return JSON-serializable values."""
        return {
            "first": self.first.name,
            "other": self.other.name,
            "equal": self.axis,
            "quantities": [
                {
                    "name": each.quantity.key,
                    "first": each.first,
                    "other": each.other,
                    "change": each.change,
                    "interval": each.interval,
                    "verdict": each.verdict,
                    "points": each.points,
                }
                for each in self.quantities
            ],
            "differences": [vars(each) for each in self.differences],
            "params": [vars(each) for each in self.params[:most_params]],
            "alerts": {run.name: alert_counts(run) for run in (self.first, self.other)},
            "notes": {run.name: list(run.notes) for run in (self.first, self.other)},
        }


def compare_runs(runs: Sequence[ComparedRun], by: Axis | None = None) -> list[Comparison]:
    """Compare every run with the first."""
    if len(runs) < 2:
        raise ConfigError("compare needs at least two runs")
    first = runs[0]
    if by == "tokens" and not all(run.tokens for run in runs):
        missing = next(run.name for run in runs if not run.tokens)
        raise ConfigError(f"{missing} has no token counts; compare by steps")
    found = []
    for other in runs[1:]:
        axis = common_axis(first, other, by)
        quantities = compare_quantities(first, other, axis)
        found.append(
            Comparison(
                first,
                other,
                axis,
                quantities,
                differences(first, other),
                param_differences(first, other),
            )
        )
    return found


def alert_counts(run: ComparedRun) -> list[dict[str, Any]]:
    """Return the rules that fired, how often, and when first; most severe first."""
    rank = {"critical": 0, "warning": 1, "info": 2}
    found: dict[tuple[str, str], list[int]] = {}
    for alert in run.alerts:
        found.setdefault((alert["severity"], alert["rule"]), []).append(alert["step"])
    return [
        {"severity": severity, "rule": rule, "count": len(steps), "first_step": min(steps)}
        for (severity, rule), steps in sorted(found.items(), key=lambda item: rank[item[0][0]])
    ]

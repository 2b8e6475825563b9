"""What a rule remembers of each row of a table: the last values of one column."""

from __future__ import annotations

from math import isfinite
from statistics import median

from distmon.record.record import InsideTable
from distmon.rules.base import Memory


def remember(
    memory: Memory, table: InsideTable, column: str, kept: int
) -> dict[str, tuple[list[float], float]]:
    """Return, by row, the finite values before this record, oldest first, and that of this one.

    Takes the new values into `memory`, which keeps the last `kept`.
    """
    series: dict[str, list[float]] = memory.setdefault(column, {})
    found = {}
    for name, value in zip(table.names, table.columns[column].tolist(), strict=True):
        before = series.get(name, [])
        found[name] = (before, value)
        if isfinite(value):
            series[name] = [*before, value][-kept:]
    return found


def usual(values: list[float]) -> float:
    """Return the median."""
    return median(values)

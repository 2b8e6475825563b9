"""How the time of an observation grows with tensors, elements and ranks.

    python benchmarks/growth.py runs/bench

A straight line is fitted through the logarithms: a slope of 0 is flat, 1 is linear. Every round is
a point of the least-squares fit, and the standard error is that of its slope.

Which cases lie on one line is read off the numbers: the same dtype, parallelism and ranks, and

- tensors: the same number of elements in each tensor,
- elements: the same number of tensors,
- ranks: the same workload, with the parallelism that is used on several ranks.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from distmon_benchmarks import wording
from distmon_benchmarks.results import Case, ResultsError
from distmon_benchmarks.summary import Summary, load

Axis = Literal["tensors", "elements", "ranks"]
AXES: Final[tuple[Axis, ...]] = ("tensors", "elements", "ranks")


@dataclass(frozen=True)
class Slope:
    """A straight line through logarithms: `y = factor * x ** slope`."""

    slope: float
    standard_error: float | None
    """None with two points, which every line fits."""
    factor: float

    def growth(self, times: float) -> float:
        """By how much y grows when x grows `times` times."""
        return float(times**self.slope)


@dataclass(frozen=True)
class Series:
    """One contender along one axis. `x` rises; `seconds` has the rounds of each x."""

    axis: Axis
    contender: str
    cases: tuple[Case, ...]
    x: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> list[float]:
        """One for each x."""
        return [float(np.median(values)) for values in self.seconds]

    def fit(self) -> Slope | None:
        """None when the times are not all above 0, as differences of steps can be."""
        points = [
            (x, value) for x, values in zip(self.x, self.seconds, strict=True) for value in values
        ]
        if any(value <= 0 for _, value in points):
            return None
        return fit([x for x, _ in points], [value for _, value in points])

    def per_unit(self) -> list[float]:
        """Seconds for each tensor, element or rank."""
        return [median / x for x, median in zip(self.x, self.medians, strict=True)]


def fit(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Least squares on logarithms. Everything above 0, and at least two different x."""
    x, y = np.log(np.asarray(xs, float)), np.log(np.asarray(ys, float))
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    intercept = float(y.mean() - slope * x.mean())
    error = None
    if len(x) > 2:
        residual = y - intercept - slope * x
        error = math.sqrt(float(residual @ residual) / (len(x) - 2) / spread)
    return Slope(slope, error, math.exp(intercept))


def series(summary: Summary, axis: Axis) -> list[Series]:
    """Every line along this axis that has at least two different x, longest first."""
    found: list[Series] = []
    for contender in summary.contenders:
        groups: dict[Hashable, dict[int, tuple[Case, list[float]]]] = {}
        for case in summary.cases:
            values = summary.values(case, contender, "observation")
            if values:
                line = groups.setdefault(_LINES[axis](case), {})
                line[getattr(case, axis)] = (case, values)
        for line in groups.values():
            if len(line) > 1:
                xs = tuple(sorted(line))
                found.append(
                    Series(
                        axis,
                        contender,
                        cases=tuple(line[x][0] for x in xs),
                        x=xs,
                        seconds=tuple(tuple(line[x][1]) for x in xs),
                    )
                )
    return sorted(found, key=lambda s: -len(s.x))


def _tensors_line(case: Case) -> Hashable:
    # Biases and norms make the elements of a tensor differ a little between numbers of layers.
    in_each = round(math.log10(case.elements / max(1, case.tensors)), 1)
    return case.dtype, case.parallel, case.ranks, in_each


def _elements_line(case: Case) -> Hashable:
    return case.dtype, case.parallel, case.ranks, case.tensors


def _ranks_line(case: Case) -> Hashable:
    return case.workload, case.dtype, case.parallel


_LINES: Final[dict[Axis, Callable[[Case], Hashable]]] = {
    "tensors": _tensors_line,
    "elements": _elements_line,
    "ranks": _ranks_line,
}


def growth_table(summary: Summary) -> Table | None:
    """Slopes by axis and contender; None when nothing was measured at two sizes."""
    table = Table(title="growth of the observation time (slope 0: flat, 1: linear)")
    for heading in ("along", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in ("from", "to", "slope", "per tensor"):
        table.add_column(heading, justify="right")
    table.add_column("on")
    for axis in AXES:
        for line in series(summary, axis):
            table.add_row(*cells(line))
    return table if table.row_count else None


def cells(line: Series) -> tuple[str, ...]:
    """A line of the table, here and on the page."""
    return (
        line.axis,
        line.contender,
        wording.count(line.x[0]),
        wording.count(line.x[-1]),
        slope_text(line.fit()),
        per_tensor_text(line) if line.axis == "tensors" else "",
        _where(line),
    )


def slope_text(slope: Slope | None) -> str:
    """`0.98 ± 0.02`."""
    if slope is None:
        return "lost in noise"
    error = "" if slope.standard_error is None else f" ± {slope.standard_error:.1g}"
    return f"{round(slope.slope, 2) + 0.0:.2f}{error}"  # never -0.00


def per_tensor_text(line: Series) -> str:
    """At each number of tensors: `9.1, 4.2, 3.9 us`."""
    return ", ".join(wording.digits(1e6 * each, 2) for each in line.per_unit()) + " us"


def _where(line: Series) -> str:
    first = line.cases[0]
    names = [*dict.fromkeys(case.workload for case in line.cases)]
    parallel = "" if first.parallel == "none" else f", {first.parallel}"
    ranks = "" if line.axis == "ranks" or first.ranks == 1 else f" on {first.ranks} ranks"
    return f"{', '.join(names)} {first.dtype}{parallel}{ranks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results of overhead.py or distmon bench")
    try:
        table = growth_table(load(parser.parse_args().folder))
    except ResultsError as error:
        print(f"growth.py: {error}", file=sys.stderr)
        sys.exit(2)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(table or "nothing was measured at two sizes")


if __name__ == "__main__":
    main()

"""How the time of an observation grows with tensors, elements and ranks.

A straight line is fitted through the logarithms: a slope of 0 is flat, 1 is linear. Every round is
a point of the least-squares fit, and the standard error is that of its slope.

Which cases lie on one line follows from the numbers: the same dtype, parallelism and ranks, and

- tensors: the same number of elements in each tensor,
- elements: the same number of tensors,
- ranks: the same workload, with the parallelism that is used on several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from distmon.bench import formatting
from distmon.bench.report import Section
from distmon.bench.results import Case, Results


def _per_tensor(case: Case) -> float:
    # Biases and norms make the elements of a tensor differ a little between numbers of layers.
    return round(math.log10(case.elements / max(1, case.tensors)), 1)


AXES: Final[Mapping[str, Callable[[Case], Hashable]]] = {
    "tensors": lambda case: (case.dtype, case.parallel, case.ranks, _per_tensor(case)),
    "elements": lambda case: (case.dtype, case.parallel, case.ranks, case.tensors),
    "ranks": lambda case: (case.workload, case.dtype, case.parallel),
}
"""Fields of a case that may vary, and what cases on one line have in common."""


@dataclass(frozen=True)
class Slope:
    """A straight line through logarithms: `y = factor * x ** slope`."""

    slope: float
    standard_error: float | None
    """None with two points, which every line fits."""
    factor: float

    def growth(self, times: float) -> float:
        """Return the growth of y when x grows `times` times."""
        return float(times**self.slope)


@dataclass(frozen=True)
class Series:
    """One contender along one axis. `x` rises; `seconds` has the rounds of each x."""

    axis: str
    contender: str
    cases: tuple[Case, ...]
    seconds: tuple[tuple[float, ...], ...]
    wrong: bool
    """Whether its answer was wrong in one of the cases."""

    @property
    def x(self) -> list[int]:
        """The size of each case."""
        return [getattr(case, self.axis) for case in self.cases]

    @property
    def medians(self) -> list[float]:
        """One for each x."""
        return [float(np.median(values)) for values in self.seconds]

    @property
    def slope(self) -> Slope | None:
        """None when the times are not all above 0, as differences of steps can be."""
        points = [(x, y) for x, ys in zip(self.x, self.seconds, strict=True) for y in ys]
        return fit(*zip(*points, strict=True)) if all(y > 0 for _, y in points) else None

    @property
    def slope_text(self) -> str:
        """As in `0.98 ± 0.02`."""
        if self.slope is None:
            return "lost in noise"
        error = self.slope.standard_error
        rounded = round(self.slope.slope, 2) + 0.0  # never -0.00
        return f"{rounded:.2f}" + ("" if error is None else f" ± {error:.1g}")

    @property
    def where(self) -> str:
        """What all cases have in common, in words."""
        first = self.cases[0]
        names = ", ".join(dict.fromkeys(case.workload for case in self.cases))
        parallel = "" if first.parallel == "none" else f", {first.parallel}"
        ranks = "" if self.axis == "ranks" or first.ranks == 1 else f" on {first.ranks} ranks"
        return f"{names} {first.dtype}{parallel}{ranks}"

    def listed(self, seconds: Sequence[float]) -> str:
        """Return one time for each x: `1.1 ms at 100, 9.8 ms at 1k`."""
        pairs = zip(seconds, self.x, strict=True)
        return ", ".join(f"{formatting.seconds(y)} at {formatting.count(x)}" for y, x in pairs)


def fit(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Fit logarithms by least squares. Everything above 0, and at least two different x."""
    x, y = np.log(np.asarray(xs, float)), np.log(np.asarray(ys, float))
    centered = x - x.mean()
    spread = float(centered @ centered)
    slope = float(centered @ y) / spread
    intercept = float(y.mean() - slope * x.mean())
    error = None
    if len(x) > 2:
        residual = y - intercept - slope * x
        error = math.sqrt(float(residual @ residual) / (len(x) - 2) / spread)
    return Slope(slope, error, math.exp(intercept))


def series(results: Results, axis: str) -> list[Series]:
    """Return every line along this axis that has at least two different x, longest first."""
    groups: dict[tuple[str, Hashable], dict[int, Case]] = {}
    for contender in results.contenders:
        for case in results.cases:
            if results.values(case, contender, "observation"):
                line = groups.setdefault((contender, AXES[axis](case)), {})
                line[getattr(case, axis)] = case
    found = [
        _series(results, axis, contender, [line[x] for x in sorted(line)])
        for (contender, _), line in groups.items()
        if len(line) > 1
    ]
    return sorted(found, key=lambda line: -len(line.cases))


def _series(results: Results, axis: str, contender: str, cases: Sequence[Case]) -> Series:
    seconds = tuple(tuple(results.values(case, contender, "observation")) for case in cases)
    wrong = any((case, contender) in results.wrong_answers for case in cases)
    return Series(axis, contender, tuple(cases), seconds, wrong)


def growth_section(results: Results) -> Section:
    """Return the slopes by axis and contender; without rows when nothing has two sizes."""
    lines = [line for axis in AXES for line in series(results, axis)]
    rows = [
        [
            line.axis,
            f"{line.contender}{', answer wrong' if line.wrong else ''}",
            line.slope_text,
            line.listed(line.medians),
            line.where,
        ]
        for line in lines
    ]
    title = "growth of the time of one observation (slope 0: flat, 1: linear)"
    return Section(title, ("along", "contender", "slope", "median", "on"), rows)

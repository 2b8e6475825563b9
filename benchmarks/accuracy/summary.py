"""Summaries of readings: errors of the total norm, errors by parameter, and coverage by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from .estimate_error import (
    claims_zero,
    coverage,
    has_error_bar,
    is_unknown,
    percentile,
    relative_error,
    rms,
)
from .readings import TOTAL, Arrays, Reading, groups
from .step_truth import QUANTITIES
from .tensor_kinds import KINDS


@dataclass(frozen=True)
class TotalError:
    """Relative error of the total gradient norm over some observations."""

    observations: int
    rms: float
    worst: float

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Self:
        """Summarize readings of the total norm."""
        arrays = Arrays.of(readings)
        errors = relative_error(arrays.estimate, arrays.truth)
        return cls(len(readings), rms(errors), percentile(errors, 100))


@dataclass(frozen=True)
class ParameterErrors:
    """Relative errors of some per-parameter numbers, and what their error bars claim."""

    count: int
    p50: float
    p90: float
    p99: float
    worst: float
    bars: int
    """Numbers with an error bar: neither unknown nor exact."""
    coverage: float
    """Share of truths within 2 standard errors, of the numbers with an error bar."""
    unknown: int
    """Numbers that the monitor reports as unknown."""
    zero_claims: int
    """Numbers reported as 0 +- 0 whose truth is not zero."""

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Self:
        """Summarize readings of parameters."""
        arrays = Arrays.of(readings)
        numbers = (arrays.estimate, arrays.stderr, arrays.truth)
        errors = relative_error(arrays.estimate, arrays.truth)
        return cls(
            count=len(readings),
            p50=percentile(errors, 50),
            p90=percentile(errors, 90),
            p99=percentile(errors, 99),
            worst=percentile(errors, 100),
            bars=int(np.sum(has_error_bar(*numbers))),
            coverage=coverage(*numbers),
            unknown=int(np.sum(is_unknown(*numbers))),
            zero_claims=int(np.sum(claims_zero(*numbers))),
        )


class Summary:
    """All summaries of a run."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        by_scope = groups(readings, lambda r: r.parameter == TOTAL)
        self.totals: list[Reading] = by_scope.get(True, [])
        self.parameters: list[Reading] = by_scope.get(False, [])
        self.modes = list(groups(self.totals, lambda r: r.mode))
        self.families = list(groups(self.totals, lambda r: r.family))
        self.batches = sorted(groups(self.totals, lambda r: r.batch))

    def total_errors(self, *by: str) -> dict[tuple[Any, ...], TotalError]:
        """Return the error of the total norm by these fields of a reading."""
        found = groups(self.totals, lambda r: tuple(getattr(r, name) for name in by))
        return {key: TotalError.of(some) for key, some in found.items()}

    def parameter_errors(self, *by: str) -> dict[tuple[Any, ...], ParameterErrors]:
        """Return the errors of parameters by these fields, in the order of QUANTITIES and KINDS."""
        found = groups(self.parameters, lambda r: tuple(getattr(r, name) for name in by))
        orders = {"quantity": QUANTITIES, "kind": KINDS, "mode": self.modes}

        def position(key: tuple[Any, ...]) -> list[int]:
            pairs = zip(by, key, strict=True)
            return [orders[name].index(value) for name, value in pairs if name in orders]

        return {key: ParameterErrors.of(found[key]) for key in sorted(found, key=position)}

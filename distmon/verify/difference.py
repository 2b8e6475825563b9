"""How far a value of a record is from its reference."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from distmon.verify.expected_row import Floats


@dataclass(frozen=True)
class Difference:
    """The worst difference of one column over all parameters and observations."""

    column: str
    kind: str
    size: float
    """Relative to the reference; infinite when only one of the two values exists."""
    limit: float
    parameter: str
    """Empty for a metric over all parameters."""
    step: int
    expected: float
    found: float

    @property
    def is_off(self) -> bool:
        return not self.size <= self.limit  # NaN is off


def relative(want: Floats, have: Floats, scale: Floats) -> Floats:
    """Return |have - want| / scale; 0 where both are NaN or equal, inf where only one is NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.abs(have - want) / scale
    size = np.where(np.isnan(size), inf, size)
    return np.where((want == have) | (np.isnan(want) & np.isnan(have)), 0.0, size)

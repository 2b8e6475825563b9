"""How far an estimate is from the truth, and whether its error bar says so.

Every tensor counts; there is no exemption. Functions take arrays, or plain numbers. NaN as a truth
means that there is nothing to estimate (no gradient); NaN as an estimate means that none was given.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

STANDARD_ERRORS: Final = 2.0
"""Half the width of an error bar."""
ROUNDING: Final = 1e-6
"""Relative error that no error bar has to include: updates are differences in float32."""

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


def relative_error(estimate: ArrayLike, truth: ArrayLike) -> Values:
    """Return (estimate - truth) / truth.

    Infinite where an estimate is missing, or given where the truth is zero or nothing.
    """
    estimate, truth = _floats(estimate), _floats(truth)
    absent = np.isnan(estimate) & np.isnan(truth)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(estimate == truth, 0.0, (estimate - truth) / truth)
    return np.where(absent, 0.0, np.where(np.isnan(error), np.inf, error))


def is_unknown(estimate: ArrayLike, stderr: ArrayLike, truth: ArrayLike) -> Flags:
    """Return where there is a truth, and the monitor says that it does not know it."""
    known = np.isfinite(_floats(estimate)) & np.isfinite(_floats(stderr))
    return ~np.isnan(_floats(truth)) & ~known


def is_covered(estimate: ArrayLike, stderr: ArrayLike, truth: ArrayLike) -> Flags:
    """Return where the truth lies within the error bar. An unknown estimate has none."""
    estimate, stderr, truth = _floats(estimate), _floats(stderr), _floats(truth)
    allowed = STANDARD_ERRORS * stderr + ROUNDING * np.abs(truth)
    within = np.abs(estimate - truth) <= allowed  # False where anything is NaN
    absent = np.isnan(estimate) & np.isnan(truth)
    return absent | (within & np.isfinite(stderr))


def has_error_bar(estimate: ArrayLike, stderr: ArrayLike, truth: ArrayLike) -> Flags:
    """Return which numbers count for the coverage: neither unknown nor exact.

    Tensors that are read in full are right without an error bar, and must not make up for others.
    A wrong number with a standard error of 0 counts.
    """
    numbers = (estimate, stderr, truth)
    exact = (_floats(stderr) == 0) & is_covered(*numbers)
    absent = np.isnan(_floats(estimate)) & np.isnan(_floats(truth))
    return ~(is_unknown(*numbers) | exact | absent)


def coverage(estimate: ArrayLike, stderr: ArrayLike, truth: ArrayLike) -> float:
    """Return the share of truths within the error bar, of those that have one; NaN for none."""
    bars = has_error_bar(estimate, stderr, truth)
    covered = is_covered(estimate, stderr, truth)
    return float(covered[bars].mean()) if bars.any() else float("nan")


def claims_zero(estimate: ArrayLike, stderr: ArrayLike, truth: ArrayLike) -> Flags:
    """Return where the monitor reports 0 +- 0 and the truth is not zero."""
    return (_floats(estimate) == 0) & (_floats(stderr) == 0) & (_floats(truth) > 0)


def rms(errors: ArrayLike) -> float:
    """Return the root of the mean square; NaN for no errors."""
    values = _floats(errors)
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else float("nan")


def percentile(errors: ArrayLike, q: float) -> float:
    """Return the q-th percentile of the magnitudes, one of the values themselves; NaN for none."""
    values = np.abs(_floats(errors))
    # Without interpolation: infinite errors must not turn their neighbors into NaN.
    return float(np.percentile(values, q, method="higher")) if values.size else float("nan")


def _floats(values: ArrayLike) -> Values:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))

"""Numbers of a view as compact JSON: short decimals for lines, bfloat16 for heat maps."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmon.runs.run_json import strict_json

Floats = NDArray[np.floating[Any]]
DIGITS = 5
"""Significant digits of numbers that are embedded as text."""
MAX_NAME = 120
"""Characters of a name; the middle of a longer one is left out."""


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return short decimals; None where the value is missing or not finite."""
    return [number(value) for value in values]


def number(value: float | None) -> float | None:
    """Return a short decimal; None where the value is missing or not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def packed(values: Floats) -> str:
    """Return the values as base64 of bfloat16, little-endian, column after column.

    Half the size of float32 with its range, sign, NaN and Inf; off by at most 0.4%.
    """
    with np.errstate(over="ignore"):
        flat = np.ascontiguousarray(values.T, dtype="<f4").reshape(-1)
    words = flat.view("<u4")
    # Round to nearest; NaN is set afterwards, as rounding could turn its payload into Inf.
    rounded = ((words.astype(np.uint64) + 0x8000) >> 16).astype("<u2")
    # The largest finite float32 would round to Inf, which stands for "not finite" here.
    rounded[np.isfinite(flat) & (rounded & 0x7FFF == 0x7F80)] -= 1
    rounded[np.isnan(flat)] = 0x7FC0
    return base64.b64encode(rounded.tobytes()).decode("ascii")


def short_name(name: str) -> str:
    """Return a name of bounded length."""
    half = (MAX_NAME - 3) // 2
    return name if len(name) <= MAX_NAME else f"{name[:half]}...{name[-half:]}"


def script_json(value: Any) -> str:
    """Return JSON that can stand in a `<script>` element: no `<` ends it early."""
    text = json.dumps(json.loads(strict_json(value)), separators=(",", ":"))
    return text.replace("<", "\\u003c")

"""Format numbers for people."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """Return three digits and a fitting unit; a negative difference stays negative."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale * 0.9995:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-9)} ns" if value else "0"


def size(value: float) -> str:
    """Return bytes in the units of memory: `1.50 KiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """Return 124M for 124439808."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """Return a percentage with two digits, however small: `0.00031%`."""
    return f"{digits(100 * value, 2)}%"


def times(value: float) -> str:
    """Return a ratio: `104x`, `1.28x`."""
    return f"{digits(value)}x"


def digits(value: float, significant: int = 3) -> str:
    """Return significant digits without an exponent: 0.0123, 1.20, 12300."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.{significant}g}")
    places = significant - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, places)}f}"

"""Numbers as people read them."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Final

from distmon_benchmarks.results import Context

BUSY: Final = 0.25
"""Load for each core, from which on others take time away from what is measured."""


def seconds(value: float) -> str:
    """Three digits and a fitting unit; a difference that noise made negative is told as it is."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale * 0.9995:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-9)} ns" if value else "0"


def size(value: float) -> str:
    """Bytes, with the units that memory is sold in."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """124439808 -> 124M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """Two digits of a percentage however small: 0.00031%."""
    return f"{digits(100 * value, 2)}%"


def times(value: float) -> str:
    """A ratio: 104x, 1.28x."""
    return f"{digits(value)}x"


def digits(value: float, significant: int = 3) -> str:
    """Significant digits without an exponent: 0.0123, 1.20, 12300."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.{significant}g}")
    places = significant - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, places)}f}"


def conditions_line(context: Context) -> str:
    """Machine, versions, commit and date in one line."""
    commit = context.commit or "unknown"
    return ", ".join(
        filter(
            None,
            (
                context.device or context.cpu,
                f"{context.cores} cores, {context.threads} threads",
                *(
                    f"{name} {context.versions[name]}"
                    for name in ("torch", "distmon")
                    if name in context.versions
                ),
                f"commit {commit[:12]}{' with changes' if context.dirty else ''}",
                f"load {context.load_before:.1f} before and {context.load_after:.1f} after",
                day(context.date),
            ),
        )
    )


def doubt(context: Context) -> str:
    """Why not to rely on the times of this run; empty when nothing speaks against it."""
    if context.load_before <= BUSY * context.cores:
        return ""
    return (
        f"the machine was busy before the run began (load {context.load_before:.1f} on "
        f"{context.cores} cores): do not rely on these times"
    )


def day(date: str) -> str:
    """The day of an ISO time; what is no time is shown as it is."""
    try:
        return datetime.fromisoformat(date).date().isoformat()
    except ValueError:
        return date

"""Numbers in few characters, for a line on a console."""

from __future__ import annotations


def plural(count: int, noun: str, adjective: str = "") -> str:
    """Return `1 record`, `2 records`."""
    return f"{count} {adjective}{noun}" + ("" if count == 1 else "s")


def percent(share: float) -> str:
    """Two digits: 0.25 is 25%."""
    return f"{100 * share:.2g}%"


def loss(value: float) -> str:
    """Four decimals, in which losses differ."""
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e5 else exponent(value)


def short(value: float) -> str:
    """Two decimals, or two digits where the number is small or large."""
    if value == 0 or 1 <= abs(value) < 1e5:
        return f"{value:.2f}"
    return f"{value:.2g}" if 1e-2 <= abs(value) < 1 else exponent(value)


def exponent(value: float) -> str:
    """Format two digits in few characters: 3.1e-3, 1e-4."""
    digits, power = f"{value:.1e}".split("e")
    return "0" if value == 0 else f"{digits.removesuffix('.0')}e{int(power)}"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:.0f}"


def thousands(value: float) -> str:
    """One decimal, with k, M or G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.95k would print as 1000.0k, so the next unit is used from 0.99995 on.
        if abs(value) >= limit * 0.99995:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """In milliseconds, or in seconds from 10 on."""
    if seconds < 0.01:
        return f"{1000 * seconds:.1f}ms"
    return f"{1000 * seconds:.0f}ms" if seconds < 9.9995 else f"{seconds:.1f}s"

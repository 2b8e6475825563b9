"""Slopes of sizes against width, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from distmon.coordcheck.measuring import Sizes

LIMIT: Final = 0.25
"""Largest slope that passes. Standard parametrization with Adam has 0.5 to 1."""
_T: Final = {1: 12.7, 2: 4.3, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23}
"""Student's 97.5% quantile by degrees of freedom; 2 from 11 on, near enough."""


@dataclass(frozen=True)
class Slope:
    """How a size grows with width: as width ** value."""

    value: float
    margin: float
    """Half of its 95% confidence interval."""

    def __str__(self) -> str:
        return f"{self.value:+.2f} ± {self.margin:.2f}"


@dataclass(frozen=True)
class Verdict:
    """One module: whether its output keeps its size as the model gets wider."""

    module: str
    moved: Slope
    """Of how far the output has moved after the last step."""
    size: Slope
    """Of the output itself after the last step."""
    verdict: str
    """`ok`, `grows`, `shrinks` or `unclear`."""

    @property
    def passes(self) -> bool:
        return self.verdict in ("ok", "unclear")


def verdicts_of(found: Sequence[Sizes], limit: float = LIMIT) -> list[Verdict]:
    """Return the verdict of every module, in layer order."""
    modules = dict.fromkeys(each.module for each in found)
    by_module = {name: [each for each in found if each.module == name] for name in modules}
    return [_verdict(name, sizes, limit) for name, sizes in by_module.items()]


def _verdict(module: str, sizes: Sequence[Sizes], limit: float) -> Verdict:
    widths = [each.width for each in sizes]
    moved = slope(widths, [each.moved[-1] for each in sizes])
    size = slope(widths, [each.size[-1] for each in sizes])
    if any(_is_growing(each, limit) for each in (moved, size)):
        verdict = "grows"
    elif moved.value + moved.margin < -limit:
        verdict = "shrinks"  # it learns less the wider it is; a small output alone is fine
    elif abs(moved.value) > limit:
        verdict = "unclear"
    else:
        verdict = "ok"
    return Verdict(module, moved, size, verdict)


def _is_growing(each: Slope, limit: float) -> bool:
    """Return whether the slope is above the limit for sure."""
    return each.value - each.margin > limit


def slope(widths: Sequence[int], sizes: Sequence[float]) -> Slope:
    """Return the least-squares slope of log(size) against log(width), with its confidence."""
    usable = [(w, s) for w, s in zip(widths, sizes, strict=True) if s > 0 and math.isfinite(s)]
    if len({w for w, _ in usable}) < 3:
        return Slope(0.0 if not usable else math.inf, 0.0)
    x, y = (np.log(np.array(column, dtype=np.float64)) for column in zip(*usable, strict=True))
    centered = x - x.mean()
    value = float(centered @ y / (centered @ centered))
    residual = y - y.mean() - value * centered
    freedom = len(x) - 2
    error = math.sqrt(float(residual @ residual) / freedom / float(centered @ centered))
    return Slope(value, _T.get(freedom, 2.23 if freedom < 11 else 2.0) * error)

"""The contenders of `distmon bench`: distmon itself and what plain torch offers.

Monitors of other projects are in the repository, under `benchmarks/contenders/`.
"""

from typing import Final

from distmon.bench.contender import NONE, Contender
from distmon.bench.contenders.distmon_monitor import AUTO, EXACT, SAMPLED
from distmon.bench.contenders.foreach_norm import ALL_NORMS, GRADIENT_NORMS
from distmon.bench.contenders.naive_clone import NAIVE_CLONE

BUILT_IN: Final[tuple[Contender, ...]] = (
    NONE,
    SAMPLED,
    AUTO,
    EXACT,
    GRADIENT_NORMS,
    ALL_NORMS,
    NAIVE_CLONE,
)
"""In the order in which tables list them."""

__all__ = [
    "ALL_NORMS",
    "AUTO",
    "BUILT_IN",
    "EXACT",
    "GRADIENT_NORMS",
    "NAIVE_CLONE",
    "NONE",
    "SAMPLED",
]

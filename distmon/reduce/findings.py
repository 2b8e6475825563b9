"""Results of a search over all ranks: where NaN began, and which replicas diverged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class NonFinite:
    """Where NaN and Inf were, as soon as it was known that there was one."""

    step: int
    signal: str
    """The signal that was not finite: `loss`, `gradient norm` or `sample`."""
    places: tuple[NonFinitePlace, ...]
    """In layer order; at most 64."""
    param_count: int
    """How many parameters held one, also those beyond the listed places."""
    counted_at: int = 0
    """Step in which the places were counted, where that was after `step`; 0: in `step` itself."""


@dataclass(frozen=True)
class NonFinitePlace:
    """One parameter on one rank."""

    param: str
    rank: int
    weight_nan: int
    weight_inf: int
    grad_nan: int
    grad_inf: int


@dataclass(frozen=True)
class Desync:
    """Ranks that should hold equal values and do not."""

    ranks: tuple[int, ...]
    """Ranks that diverged from the majority; in a tie, those that differ from the lowest rank."""
    reference: int
    """A rank that agrees with the majority."""
    params: tuple[str, ...]
    tie: bool


def has_nonfinite(located: NonFinite | None, losses: Iterable[float], sampled: bool) -> bool:
    """Return whether anything is NaN or Inf that should not be: the one predicate for it.

    `sampled`: a sampled weight or gradient is NaN or Inf.
    """
    return located is not None or sampled or not all(map(isfinite, losses))

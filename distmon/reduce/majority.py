"""Which ranks differ from the others, and how that is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def minority(values: Sequence[float]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; in a tie the lowest rank wins."""
    most, _ = Counter(values).most_common(1)[0]  # of equal ones the first that appeared
    return [rank for rank, value in enumerate(values) if value != most]


def by_value(values: Sequence[Any]) -> str:
    """Describe which ranks have which value: `100 on rank 0, 2; 50 on rank 1`."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on rank {listed(those)}" for value, those in ranks.items())


def listed(ranks: Iterable[int]) -> str:
    """Join rank numbers for a message."""
    return ", ".join(map(str, ranks))

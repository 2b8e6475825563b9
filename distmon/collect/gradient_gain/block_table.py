"""The blocks of a model, and the columns that are sent of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COLUMNS: Final = ("input_square", "input_count", "output_square", "output_count", "holders")
"""Columns of a block, summed over ranks. `holders` counts the ranks that have the block."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of the whole model."""

    names: tuple[str, ...] = ()
    """In layer order."""
    longest: int = 0
    """Blocks of the longest chain: how many gains are multiplied on the way back."""

"""Who holds which piece of which parameter, known to every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """Where a rank's piece lies in the whole parameter: a box, or a part of it laid out flat."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: bool = False

    @property
    def count(self) -> int:
        """Elements in the piece."""
        return math.prod(self.size)

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece as a view of the whole, contiguous tensor."""
        piece = whole.view(-1) if self.flat else whole
        for dimension, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            piece = piece.narrow(dimension, start, size)
        return piece


def everything(shape: torch.Size) -> Place:
    """The place of a parameter that is not cut."""
    return Place((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Holdings:
    """The pieces of all ranks."""

    shapes: dict[str, torch.Size]
    """Of the whole parameters, by name; the whole model, whatever this rank holds."""
    places: list[dict[str, Place]]
    """By rank and name. A rank without elements of a parameter has no place for it."""

    def holders(self, name: str) -> list[int]:
        """Ranks that hold elements of a parameter."""
        return [rank for rank, places in enumerate(self.places) if name in places]

    def copies(self, name: str) -> int:
        """How many ranks hold each element of a parameter."""
        held = sum(places[name].count for places in self.places if name in places)
        return held // self.shapes[name].numel()

    def is_first(self, name: str, rank: int) -> bool:
        """Whether no rank before this one holds the same piece."""
        place = self.places[rank][name]
        return all(places.get(name) != place for places in self.places[:rank])

"""The reduced numbers of one observation, before anything is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import Column
from distmon.reduce.findings import Desync, NonFinite
from distmon.reduce.reduced import Reduced
from distmon.reduce.reduced_view import ReducedView


@dataclass(frozen=True)
class Observation:
    """Reduced numbers of one observation, equal on all ranks, with nothing derived yet."""

    step: int
    fields: Mapping[str, Column]
    """Fields of the rank slots: `fields[name][rank]`."""
    losses: Mapping[int, float]
    """By step since the last observation, mean over ranks."""
    blocks: Column
    """Sums of the gradient norms of blocks."""
    inside: Column
    """Sums of what is watched inside the model."""
    inside_maxima: NDArray[np.float32]
    applied: bool
    """Whether an optimizer stepped any parameter."""
    nbytes: int
    """Bytes that one rank sent."""
    interval: int
    """Steps from one observation to the next, when this one was made."""
    read: Callable[[], Reduced]
    """Returns all reduced numbers; valid until the next observation has arrived."""
    number: int = 0
    """1 for the first observation of the process."""
    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    tasks: Mapping[str, float] | None = None

    @classmethod
    def from_view(
        cls,
        view: ReducedView,
        numbers: tuple[int, int, int],
        losses: Mapping[int, float],
        found: tuple[NonFinite | None, Desync | None, Mapping[str, float] | None],
        read: Callable[[], Reduced] | None = None,
        fields: Mapping[str, Column] | None = None,
    ) -> Self:
        """Return the observation in a view of the reduced buffers.

        `numbers` are step, interval and number; `found` is what searches have found. `read`: where
        it is not `view.read`, because partial gradients had to be added up. `fields`: those of the
        rank slots, where they were read before.
        """
        step, interval, number = numbers
        nonfinite, desync, tasks = found
        return cls(
            step=step,
            fields=view.read_slots()[0] if fields is None else fields,
            losses=losses,
            blocks=view.blocks.copy(),
            inside=view.inside.copy(),
            inside_maxima=view.inside_maxima.copy(),
            applied=view.applied,
            nbytes=view.added.nbytes + view.highest.nbytes,
            interval=interval,
            number=number,
            nonfinite=nonfinite,
            desync=desync,
            tasks=tasks,
            read=read or view.read,
        )

"""An observation whose reduced numbers have arrived on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from distmon.probe.partial_gradients import PartialGradients
from distmon.record.observation import Observation
from distmon.reduce.findings import has_nonfinite
from distmon.reduce.outbox import Shipment
from distmon.reduce.reduced import Reduced
from distmon.reduce.reduced_view import ReducedView
from distmon.runtime.searches import LocalEvidence, Search, Searches
from distmon.writer import sent_observation
from distmon.writer.session import Held


@dataclass(frozen=True)
class InFlight:
    """What this rank keeps of an observation until it has arrived."""

    local: LocalEvidence
    interval: int
    steps: Sequence[int] = ()
    """Steps since the last observation, whose losses it carries."""
    losses: Sequence[tuple[int, Any]] = ()
    """This rank's own losses by step, on their device."""


class Arrived:
    """The reduced numbers of one observation, and the searches that follow from them."""

    def __init__(
        self, shipment: Shipment[InFlight], partial: PartialGradients, searches: Searches
    ) -> None:
        assert shipment.buffers is not None
        self.number = shipment.number
        self.local = shipment.kept.local
        self.buffers = shipment.buffers
        """Read when a record is derived; the holder of this object gives them back."""
        self.handed_over = False
        """Whether the evaluation of this rank has it."""
        self.fields, _ = self.buffers.view.read_slots()
        self._flight = shipment.kept
        self._partial = partial
        # Partial gradients are rows only after they were added up.
        sampled = self._reduced if partial.size else self.buffers.view
        self._sampled_nonfinite = sampled.sample_has_nonfinite
        self.search: Search = searches.begin(self.fields, self._sampled_nonfinite, self.local)

    @cached_property
    def _reduced(self) -> Reduced:
        reduced = self.buffers.view.read()
        self._partial.fill(reduced.partial_gradients, reduced.sums, reduced.maxima, reduced.bins)
        return reduced

    @cached_property
    def losses(self) -> dict[int, float]:
        """By step since the last observation, mean over ranks."""
        return self.buffers.view.read_losses(self._flight.steps)

    @property
    def has_nonfinite(self) -> bool:
        """Whether anything is NaN or Inf that should not be, once the searches have ended."""
        found = self.search.found.nonfinite
        return has_nonfinite(found, self.losses.values(), self._sampled_nonfinite)

    def observation(self, copied: bool) -> Observation:
        """Return the observation, once the searches have ended.

        `copied`: it is read later, when the buffers are in use again.
        """
        if copied:
            _ = self._reduced
        return Observation.from_view(*self._parts, lambda: self._reduced, self.fields)

    def message(self, mfu_source: str) -> tuple[Any, ...]:
        """Return what the writer process makes the observation of, once the searches have ended."""
        if self._partial.size:
            observation = self.observation(copied=False)
            return replace(observation, read=Held(observation.read())), mfu_source
        return sent_observation.to_message(*self._parts, mfu_source)

    @property
    def _parts(self) -> tuple[ReducedView, tuple[int, int, int], dict[int, float], tuple[Any, ...]]:
        found = self.search.found
        numbers = self.local.step, self._flight.interval, self.number
        return self.buffers.view, numbers, self.losses, (found.nonfinite, found.desync, found.tasks)

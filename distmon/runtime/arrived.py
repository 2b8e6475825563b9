"""An observation whose reduced numbers have arrived on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distmon.probe.partial_gradients import PartialGradients
from distmon.record.observation import Observation
from distmon.reduce.outbox import Shipment
from distmon.reduce.reduced import Reduced
from distmon.runtime.searches import LocalEvidence, Search, Searches


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

    def observation(self, copied: bool) -> Observation:
        """Return the observation, once the searches have ended.

        `copied`: it is read by another thread, when the buffers are in use again.
        """
        found, view = self.search.found, self.buffers.view
        if copied:
            _ = self._reduced
        return Observation.from_view(
            view,
            (self.local.step, self._flight.interval, self.number),
            view.read_losses(self._flight.steps),
            (found.nonfinite, found.desync, found.tasks),
            fields=self.fields,
            sampled_nonfinite=self._sampled_nonfinite,
            read=lambda: self._reduced,
            view=None if copied or self._partial.size else view,
        )

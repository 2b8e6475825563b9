"""An observation whose reduced numbers have arrived on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from distmon.errors import CollectiveError
from distmon.probe.partial_gradients import PartialGradients
from distmon.record.builder import Observation
from distmon.reduce.buffers import HostBuffers, Reduced
from distmon.runtime.searches import LocalEvidence, Search, Searches

_MOST_TRIES: Final = 3


@dataclass(frozen=True)
class InFlight:
    """What this rank keeps of an observation until it has arrived."""

    local: LocalEvidence
    interval: int
    steps: Sequence[int] = ()
    """Steps since the last observation, whose losses it carries."""
    losses: Sequence[tuple[int, Any]] = ()
    """This rank's own losses by step, on their device."""


@dataclass
class Landed:
    """An observation that has been reduced, and that nobody has looked into."""

    number: int
    """1 for the first observation of the process."""
    flight: InFlight
    buffers: HostBuffers
    partial: PartialGradients
    searches: Searches
    _tries: int = 0

    def unpack(self) -> Arrived:
        """Return it with its slots and searches.

        Other ranks may depend on a search that this one does not enter: so it is tried again after
        an error, and then raises a CollectiveError.
        """
        self._tries += 1
        if self._tries > _MOST_TRIES:
            raise CollectiveError(f"observation {self.number} cannot be read on this rank")
        return Arrived(self)


class Arrived:
    """The reduced numbers of one observation, and the searches that follow from them."""

    def __init__(self, landed: Landed) -> None:
        self.number = landed.number
        self.local = landed.flight.local
        self.buffers = landed.buffers
        """Read when a record is derived; whoever holds this object gives them back."""
        self.fields, _ = landed.buffers.read_slots()
        self._flight = landed.flight
        self._partial = landed.partial
        # Partial gradients are rows only after they were added up.
        sampled = self._reduced if landed.partial.size else landed.buffers
        self._sampled_nonfinite = sampled.sample_has_nonfinite
        self.search: Search = landed.searches.begin(
            self.fields, self._sampled_nonfinite, self.local
        )

    @cached_property
    def _reduced(self) -> Reduced:
        reduced = self.buffers.read()
        self._partial.fill(reduced.partial_gradients, reduced.sums, reduced.maxima, reduced.bins)
        return reduced

    def observation(self, copied: bool) -> Observation:
        """Return the observation, once the searches have ended.

        `copied`: it is read by another thread, when the buffers are in use again.
        """
        found, buffers = self.search.found, self.buffers
        if copied:
            _ = self._reduced
        return Observation(
            step=self.local.step,
            fields=self.fields,
            losses=buffers.read_losses(self._flight.steps),
            blocks=buffers.blocks.numpy().copy(),
            applied=buffers.applied,
            sampled_nonfinite=self._sampled_nonfinite,
            nbytes=buffers.sizes.nbytes,
            interval=self._flight.interval,
            read=lambda: self._reduced,
            nonfinite=found.nonfinite,
            desync=found.desync,
            tasks=found.tasks,
        )

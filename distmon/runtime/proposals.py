"""What rank 0 proposes takes effect on all ranks at the same exchange.

Rank 0 proposes in one exchange. In each later one a rank acknowledges the proposal if it has
arrived there by then. At the exchange after the one in which all ranks acknowledge it, it is in
effect: a rank that has acknowledged it knows by then, because it waits for the exchange before,
which all ranks have launched. A rank that does not know of a proposal never waits.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Proposal = TypeVar("Proposal")


class Proposals(Generic[Proposal]):
    """The proposal that is on its way, as this rank knows it. Pure; no tensors.

    Exchanges are known by their number, which is the same on all ranks. Rank 0 proposes nothing
    until its last proposal is in effect.
    """

    def __init__(self) -> None:
        self._newest = 0
        self.known: Proposal | None = None
        """Acknowledged in the next exchange."""
        self._agreed_at = 0

    def arrive(self, number: int, proposal: Proposal | None, acknowledged: bool) -> None:
        """Take in exchange `number`, the next one that has arrived.

        `acknowledged`: all ranks acknowledge in it the proposal that is known here.
        """
        self._newest = number
        if self.known is None:
            self.known = proposal
        elif acknowledged:
            self._agreed_at = number

    def must_wait(self, number: int) -> bool:
        """Return whether it is open if a proposal takes effect at exchange `number`: the exchange
        before it is missing."""
        return self.known is not None and self._newest < number - 1

    def take(self, number: int) -> Proposal | None:
        """Return what is in effect from exchange `number` on; None for nothing new.

        Call it at every exchange, once `must_wait` is False.
        """
        if not self._agreed_at or number != self._agreed_at + 1:
            return None
        proposal, self.known, self._agreed_at = self.known, None, 0
        return proposal

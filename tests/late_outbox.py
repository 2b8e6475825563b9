"""Observations that arrive late, as from an accelerator or a slow network."""

from __future__ import annotations

from typing import Any

from distmon import Monitor
from distmon.reduce.buffers import Buffers, HostPool
from distmon.reduce.channel import Channel
from distmon.reduce.outbox import HostOutbox, Shipment


class LateOutbox(HostOutbox[Any]):
    """Lets every observation arrive some polls after it was posted, or after `release`."""

    delay = 4
    """In polls."""

    def __init__(self, channel: Channel, pool: HostPool) -> None:
        super().__init__(channel, pool)
        self._polls = 0
        self._posted: dict[int, int] = {}
        self._released = False

    def post(self, shipment: Shipment[Any], buffers: Buffers | None) -> None:
        self._posted[shipment.number] = self._polls
        super().post(shipment, buffers)

    def first_arrived(self) -> Shipment[Any] | None:
        self._polls += 1
        return None if self.waits_for_device else super().first_arrived()

    @property
    def waits_for_device(self) -> bool:
        if self._released or not self.shipments:
            return False
        return self._polls < self._posted[self.shipments[0].number] + self.delay

    def release(self) -> None:
        """Hold nothing back any more."""
        self._released = True


def make_late(monitor: Monitor) -> LateOutbox:
    """Let the observations of this monitor arrive two steps after they were made."""
    observer = monitor.cycle.observer
    observer.outbox = LateOutbox(observer.ranks.observations, observer.outbox.pool)
    return observer.outbox

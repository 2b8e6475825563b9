"""Observations on their way to all ranks and back, in the order of their steps.

Every rank sends every observation exactly once, so that ranks pair the right ones however late one
of them is. With the host transport nothing here waits: buffers are copied to pinned memory behind
an event, then reduced by gloo's own threads, and `first_arrived` finds what has arrived. An
observation for which there is no memory, because earlier ones are still in flight, is sent empty
later.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from distmon.device import DeviceMark
from distmon.errors import CollectiveError
from distmon.reduce.buffers import Buffers, HostBuffers, HostPool
from distmon.reduce.channel import Channel, Pending

Kept = TypeVar("Kept")


@dataclass
class Shipment(Generic[Kept]):
    """One observation that was sent, or is still to be sent."""

    number: int
    """1 for the first observation of the process; the same on all ranks."""
    step: int
    plan_hash: int
    kept: Kept
    """What this rank keeps of it until it has arrived."""
    buffers: HostBuffers | None = None
    """Where its reduced numbers are; None while there is no memory for it."""
    copied: DeviceMark | None = None
    """Reached when the device has copied what it computed."""
    pending: Pending | None = None
    pool: HostPool | None = None
    """For memory of the sizes that all ranks had when it was posted."""

    def arrived(self) -> bool:
        """Return whether the reduced numbers are on the host, or the collectives have failed."""
        return self.pending is not None and self.pending.done()


class HostOutbox(Generic[Kept]):
    """Reduces over gloo, on the host, while training continues."""

    def __init__(self, channel: Channel, pool: HostPool) -> None:
        self._channel = channel
        self.pool = pool
        self.held = False
        """Nothing is launched: ranks do not know yet whether they would launch the same."""
        self.shipments: deque[Shipment[Kept]] = deque()
        """What is in flight, the oldest first."""
        self.posted = 0
        """Number of the newest observation that was posted."""
        self.posted_step = 0
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self.shipments)

    def post(self, shipment: Shipment[Kept], buffers: Buffers | None) -> None:
        """Send an observation; without `buffers` nothing was measured for lack of memory.

        Host buffers are handed over; what is on a device is copied and may be filled again.
        """
        shipment.pool = self.pool
        self.shipments.append(shipment)
        self.posted, self.posted_step = shipment.number, shipment.step
        if isinstance(buffers, HostBuffers):
            shipment.buffers = buffers
        elif buffers is not None:
            self._ship_from_device(shipment, buffers)
        self._launch()

    def _ship_from_device(self, shipment: Shipment[Kept], buffers: Buffers) -> None:
        if (host := self.pool.take()) is not None:
            shipment.copied = _copy(buffers, host)
            shipment.buffers = host

    def _launch(self) -> None:
        """Launch what is ready, in order."""
        if self.held:
            return
        for shipment in self.shipments:
            if shipment.pending is not None:
                continue
            if shipment.buffers is None:
                if (spare := (shipment.pool or self.pool).take()) is None:
                    return
                spare.put_failure(shipment.step, shipment.plan_hash)
                shipment.buffers = spare
            if shipment.copied is not None and not shipment.copied.done():
                return
            shipment.pending = self._reduce(shipment.buffers)

    def _reduce(self, buffers: Buffers) -> Pending:
        return self._channel.launch(*buffers.reductions)

    def first_arrived(self) -> Shipment[Kept] | None:
        """Return the oldest observation if it has arrived; it stays until `remove_first`.

        Raises CollectiveError when its collectives failed.
        """
        self._launch()
        first = self.shipments[0] if self.shipments else None
        if first is None or first.pending is None or not first.arrived():
            return None
        first.pending.join()
        return first

    def remove_first(self) -> None:
        """Forget the observation that `first_arrived` has returned."""
        self.shipments.popleft()

    def take_seconds(self) -> float:
        """Return the time that this thread spent in collectives since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def waits_for_device(self) -> bool:
        """Whether the device has not copied an observation yet."""
        return any(s.copied is not None and not s.copied.done() for s in self.shipments)

    def abandon(self) -> list[int]:
        """Forget what is in flight; return its steps."""
        steps = [shipment.step for shipment in self.shipments]
        self.shipments.clear()
        return steps


class DeviceOutbox(HostOutbox[Kept]):
    """Reduces where the weights are, with the job's own backend.

    On an accelerator the collectives are queued on the current stream; on a CPU this rank waits for
    the others in the observed step.
    """

    def _ship_from_device(self, shipment: Shipment[Kept], buffers: Buffers) -> None:
        try:
            self._reduce(buffers)
            # Over the pool's limit if it must be: other ranks count on what follows from it.
            host = self.pool.take() or self.pool.allocate()
            mark = _copy(buffers, host)
        except CollectiveError:
            raise
        except Exception as error:  # the device's buffers are filled again by the next observation
            raise CollectiveError(f"{type(error).__name__}: {error}") from error
        shipment.buffers, shipment.copied, shipment.pending = host, mark, _Copied(mark)

    def _reduce(self, buffers: Buffers) -> Pending:
        begin = time.perf_counter()
        try:
            pending = self._channel.launch(*buffers.reductions)
            pending.join()
            return pending
        finally:
            self._seconds += time.perf_counter() - begin


class _Copied(Pending):
    """A copy to the host, as what is waited for."""

    def __init__(self, mark: DeviceMark) -> None:
        super().__init__()
        self._mark = mark

    def done(self) -> bool:
        return self._mark.done()


def _copy(source: Buffers, target: HostBuffers) -> DeviceMark:
    target.sum.copy_(source.sum, non_blocking=True)
    target.max.copy_(source.max, non_blocking=True)
    return DeviceMark(source.sum.device)

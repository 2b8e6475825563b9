"""Observations on their way to all ranks and back, in the order of their steps.

Every rank sends every observation exactly once, so that ranks pair the right ones however late one
of them is. With the host transport nothing here waits: buffers are copied to pinned memory behind
an event, then reduced by gloo's own threads, and `poll` finds what has arrived. An observation for
which there is no memory, because earlier ones are still in flight, is sent empty later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from distmon.device import DeviceMark
from distmon.reduce.buffers import Buffers, HostBuffers, HostPool
from distmon.reduce.channel import Channel, Pending


@dataclass
class Shipment:
    """One observation that was sent, or is still to be sent."""

    step: int
    plan_hash: int
    buffers: HostBuffers | None = None
    """Where its reduced numbers are; None while there is no memory for it."""
    copied: DeviceMark | None = None
    """Reached when the device has copied what it computed."""
    pending: Pending | None = None

    def arrived(self) -> bool:
        """Return whether the reduced numbers are on the host, or the collectives have failed."""
        return self.pending is not None and self.pending.done()


class HostOutbox:
    """Reduces over gloo, on the host, while training continues."""

    def __init__(self, channel: Channel, pool: HostPool) -> None:
        self._channel = channel
        self.pool = pool
        self._shipments: deque[Shipment] = deque()
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._shipments)

    def post(self, buffers: Buffers | None, step: int, plan_hash: int) -> None:
        """Send the observation of `step`; None when nothing was measured for lack of memory.

        Host buffers are handed over; what is on a device is copied and may be filled again.
        """
        shipment = Shipment(step, plan_hash)
        self._shipments.append(shipment)
        if isinstance(buffers, HostBuffers):
            shipment.buffers = buffers
        elif buffers is not None and (host := self.pool.take()) is not None:
            shipment.copied = _copy(buffers, host)
            shipment.buffers = host
        self._launch()

    def _launch(self) -> None:
        """Launch what is ready, in order."""
        for shipment in self._shipments:
            if shipment.pending is not None:
                continue
            if shipment.buffers is None:
                if (spare := self.pool.take()) is None:
                    return
                spare.put_failure(shipment.step, shipment.plan_hash)
                shipment.buffers = spare
            if shipment.copied is not None and not shipment.copied.done():
                return
            shipment.pending = self._channel.launch(*shipment.buffers.reductions)

    def poll(self) -> Iterator[HostBuffers]:
        """Yield what has arrived, in order. Raises CollectiveError when a collective failed."""
        self._launch()
        while self._shipments and self._shipments[0].arrived():
            first = self._shipments[0]
            assert first.pending is not None
            assert first.buffers is not None
            first.pending.join()
            self._shipments.popleft()
            yield first.buffers
            self._launch()

    def take_seconds(self) -> float:
        """Return the time that this thread spent in collectives since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def waits_for_device(self) -> bool:
        """Whether the device has not copied an observation yet."""
        return any(s.copied is not None and not s.copied.done() for s in self._shipments)

    def abandon(self) -> list[int]:
        """Forget what is in flight; return its steps."""
        steps = [shipment.step for shipment in self._shipments]
        self._shipments.clear()
        return steps


class DeviceOutbox(HostOutbox):
    """Reduces where the weights are, with the job's own backend.

    On an accelerator the collectives are queued on the current stream; on a CPU this rank waits for
    the others in the observed step.
    """

    def post(self, buffers: Buffers | None, step: int, plan_hash: int) -> None:
        shipment = Shipment(step, plan_hash)
        self._shipments.append(shipment)
        if isinstance(buffers, HostBuffers):
            shipment.buffers = buffers
            shipment.pending = self._join(buffers)
        elif buffers is not None:
            self._join(buffers)
            shipment.buffers = self.pool.take()
            if shipment.buffers is None:  # this rank alone has nothing to derive a record from
                self._shipments.pop()
                return
            shipment.copied = _copy(buffers, shipment.buffers)
            shipment.pending = _Copied(shipment.copied)
        else:
            self._launch()

    def _join(self, buffers: Buffers) -> Pending:
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

"""Observations that arrive late, as from an accelerator or a slow network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from distmon import Monitor
from distmon.reduce.buffers import Buffers, HostBuffers, HostPool
from distmon.reduce.channel import Channel
from distmon.reduce.outbox import HostOutbox


class LateOutbox(HostOutbox):
    """Lets every observation arrive some polls after it was posted, or after `release`."""

    def __init__(self, channel: Channel, pool: HostPool) -> None:
        super().__init__(channel, pool)
        self._polls = 0
        self._posted: deque[int] = deque()
        self._released = False

    def post(self, buffers: Buffers | None, step: int, plan_hash: int) -> None:
        self._posted.append(self._polls)
        super().post(buffers, step, plan_hash)

    def poll(self) -> Iterator[HostBuffers]:
        self._polls += 1
        if self._posted and not self.waits_for_device:
            for _ in range(len(self._posted) if self._released else 1):
                self._posted.popleft()
                yield next(super().poll())

    @property
    def waits_for_device(self) -> bool:
        return bool(self._posted) and not self._released and self._polls < self._posted[0] + 4

    def release(self) -> None:
        """Hold nothing back any more."""
        self._released = True


def make_late(monitor: Monitor) -> LateOutbox:
    """Let the observations of this monitor arrive two steps after they were made."""
    observer = monitor.cycle.observer
    observer.outbox = LateOutbox(observer.ranks.observations, observer.outbox.pool)
    return observer.outbox

"""Threads of the monitor in the training process, and the time that they take from it.

A thread that runs Python holds the interpreter lock, and training waits for it: the CPU time of
these threads is part of the monitor's cost.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_running: list[OwnThread] = []
"""Those of this process that have not ended; a list is appended to, and removed from, at once."""


class OwnThread(threading.Thread):
    """A daemon thread whose CPU time can be read from other threads."""

    def __init__(self, target: Callable[..., Any], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=f"distmon-{name}", args=tuple(args), daemon=True)
        self._clock: int | None = None

    def run(self) -> None:
        # Asked for by the thread itself: the clock of a thread that has ended can then be asked
        # for the time, and raises.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        _running.append(self)
        try:
            super().run()
        finally:
            _running.remove(self)

    def cpu_seconds(self) -> float:
        """Return the CPU time so far; 0 where it cannot be read."""
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:
            return 0.0


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of another process so far; 0 where the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock of its CPU time, as Linux numbers it
    except OSError:  # it has ended
        return 0.0


def run_within(seconds: float, work: Callable[[], Any], name: str) -> None:
    """Run `work` on a thread and wait for it, `seconds` at most: a file system may hang."""
    thread = OwnThread(work, name)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or there are too many threads
        work()
    else:
        thread.join(seconds)


class ThreadCosts:
    """CPU time of all such threads of this process, spread over the time that it is about."""

    def __init__(self, period_s: float = 0.25, now: Callable[[], float] = time.monotonic) -> None:
        """`period_s`: shortest time between two readings, each of which asks the system."""
        self._now = now
        self._before: dict[OwnThread, float] = {}
        self._period_s = period_s
        self._read_at = self._taken_at = -math.inf
        self._untaken = 0.0
        self.take()

    def take(self) -> float:
        """Return the seconds since the last call; within a period, a part of those before."""
        clock = self._now()
        if clock - self._read_at >= self._period_s:
            self._read_at = clock
            now = {thread: thread.cpu_seconds() for thread in [*_running]}
            before, self._before = self._before, now
            for thread, seconds in now.items():
                self._untaken += max(0.0, seconds - before.get(thread, 0.0))
        part = min(1.0, (clock - self._taken_at) / self._period_s)
        self._taken_at = clock
        taken = part * self._untaken
        self._untaken -= taken
        return taken

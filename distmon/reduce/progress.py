"""Which rank has reached which step, for the message after a failed collective.

Ranks publish their steps in the job's key-value store. The store may be unreachable, and asking it
then blocks for as long as the job's timeout: so a daemon thread asks, and training does not wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch.distributed as dist

PATIENCE_S: Final = 5.0
"""How long other ranks may take to publish their steps."""
HURRY_S: Final = 1.0
"""The same where the process ends meanwhile: a launcher may wait for that to restart all ranks."""
SMALL_WORLD: Final = 16
"""Up to this many ranks each of them asks for the others; above, rank 0 alone. The store is one
process, and all ranks fail at once: with 4096 of them it would get 16 million requests a round."""
_ENDED: Final = "ended"
_REQUESTS_PER_S: Final = 5000
"""Of all ranks that ask whether one has ended."""


class EndWatch:
    """Asks again and again, on a thread of its own, whether a rank has ended."""

    def __init__(self, ask: Callable[[], bool], pause_s: float) -> None:
        self._ask = ask
        self._pause_s = pause_s
        self.ended = False
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="distmon-progress", daemon=True).start()

    def _run(self) -> None:
        with suppress(Exception):  # the store may be gone with the process that served it
            while not (self._stopped.is_set() or self.ended):
                self.ended = self._ask()
                self._stopped.wait(self._pause_s)

    def stop(self) -> None:
        """Ask no more; does not wait for an answer."""
        self._stopped.set()


class Progress:
    """A key space of the monitor's own in the job's store."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        """`name` is the same on all ranks, and another one for every monitor of the job."""
        c10d: Any = dist.distributed_c10d
        self._rank = rank
        self._size = size
        self._deadline = math.inf
        self._store = c10d.PrefixStore(f"distmon/{name}", c10d._get_default_store())

    def describe(self, step: int, then: Callable[[str], None]) -> threading.Thread:
        """Publish that this rank has ended, and call `then` with the steps of all ranks.

        Both on a thread of its own, which is returned; `then` gets at least this rank's step, and
        no more than that on ranks other than 0 of a large world.
        """
        asks = self._rank == 0 or self._size <= SMALL_WORLD

        def ask() -> None:
            steps = {self._rank: step}
            with suppress(Exception):  # the store may be gone with the process that served it
                self._publish(step)
                if asks:
                    self._collect(steps)
            then(self._sentence(steps, asks))

        thread = threading.Thread(target=ask, name="distmon-progress", daemon=True)
        thread.start()
        return thread

    def hurry(self) -> None:
        """Let `describe` wait for other ranks for a moment only: the process is about to end."""
        self._deadline = min(self._deadline, time.monotonic() + HURRY_S)

    def publish(self, step: int) -> None:
        """Publish that this rank has ended at `step`, without waiting for the store."""

        def put() -> None:
            with suppress(Exception):
                self._publish(step)

        threading.Thread(target=put, name="distmon-progress", daemon=True).start()

    def _publish(self, step: int) -> None:
        self._store.set(_ENDED, "1")  # first: ranks may be waiting for this one
        self._store.set(str(self._rank), str(step))

    def watch_end(self) -> EndWatch:
        """Ask from now on, without waiting for the store, whether a rank has ended."""
        pause = max(0.002, self._size / _REQUESTS_PER_S)
        return EndWatch(lambda: bool(self._store.check([_ENDED])), pause)

    def _collect(self, steps: dict[int, int]) -> None:
        """Add the steps of the ranks that publish theirs in time."""
        self._deadline = min(self._deadline, time.monotonic() + PATIENCE_S)
        pause = min(1.0, max(0.05, self._size / 4000))
        while True:
            missing = [rank for rank in range(self._size) if rank not in steps]
            for rank in self._published(missing):
                steps[rank] = int(self._store.get(str(rank)))
            if len(steps) == self._size or time.monotonic() >= self._deadline:
                return
            time.sleep(pause)

    def _published(self, ranks: list[int]) -> Iterator[int]:
        """Yield those of the ranks that have published their steps.

        The store answers whether it has all of some keys: halves are asked for where it has not.
        """
        if not ranks:
            return
        if self._store.check([str(rank) for rank in ranks]):
            yield from ranks
        elif len(ranks) > 1:
            half = len(ranks) // 2
            yield from self._published(ranks[:half])
            yield from self._published(ranks[half:])

    def _sentence(self, steps: dict[int, int], asked: bool) -> str:
        parts = [
            f"rank {_listed(r for r in sorted(steps) if steps[r] == at)} at step {at}"
            for at in sorted({*steps.values()})
        ]
        if not asked:
            parts.append("rank 0 lists the others")
        elif missing := [rank for rank in range(self._size) if rank not in steps]:
            parts.append(f"rank {_listed(missing)} did not respond")
        return "; ".join(parts)


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))

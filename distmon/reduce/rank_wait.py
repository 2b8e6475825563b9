"""A wait for other ranks in a step, which is over as soon as one of them has ended.

A rank whose monitoring has ended launches nothing any more: what it owes never arrives. It says so
in the job's store, and a rank that waits asks there, on a thread of its own: the store may be
unreachable, and asking it then blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from distmon.errors import CollectiveError
from distmon.reduce.progress import EndWatch, Progress

_POLL_SECONDS: Final = 0.0005
_ASK_AFTER_S: Final = 0.01
"""Most waits are shorter: the store is not asked in them."""
_GRACE_S: Final = 0.02
"""What an ended rank has launched before may still be on its way."""


class RankWait:
    """Waits for a condition that other ranks bring about; used as a context."""

    def __init__(self, seconds: float, progress: Progress | None, what: str) -> None:
        """`what`: the subject of the sentence for a wait in vain."""
        self._seconds = seconds
        self._progress = progress
        self._what = what
        self._watch: EndWatch | None = None

    def until(self, is_there: Callable[[], bool]) -> None:
        """Return when it is there.

        Raises CollectiveError when it is not within the time, or cannot come any more.
        """
        begin = time.monotonic()
        ended_at: float | None = None
        while not is_there():
            now = time.monotonic()
            if now - begin > self._seconds:
                raise CollectiveError(f"{self._what} did not arrive within {self._seconds:g} s")
            if self._watch is None and self._progress is not None and now - begin > _ASK_AFTER_S:
                self._watch = self._progress.watch_end()
            if ended_at is None and self._watch is not None and self._watch.ended:
                ended_at = now
            if ended_at is not None and now - ended_at > _GRACE_S:
                raise CollectiveError(f"{self._what} cannot arrive: another rank has ended")
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.stop()

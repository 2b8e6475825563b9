"""One run that clients look at: read once for all of them, and only what is new is sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from distmon.errors import DistmonError
from distmon.report.encoding import script_json
from distmon.report.param_history import Layout
from distmon.report.view import state_entry, view_and_layout
from distmon.runs.reader import News, RunTail

PERIOD_S: Final = 1.0
KEPT_CHANGES: Final = 200
RECENT: Final = 30


@dataclass(frozen=True)
class Change:
    """What clients append to their view, or the order to load it again."""

    sequence: int
    kind: str
    """`append`, `state` or `reload`."""
    data: str


class LiveRun:
    """The view of a run and the changes since. All methods run in the server's event loop."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.readers = 0
        self._path = path
        self._tail = RunTail(path)
        self._layout: Layout | None = None
        self._view = ""
        self._view_sequence = 0
        self._sequence = 0
        self._state: dict[str, str] = {}
        self._records: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._alerts: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._changes: deque[Change] = deque(maxlen=KEPT_CHANGES)
        self._changed = asyncio.Condition()
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def view(self) -> str:
        """Return the JSON of the view, with the number of the last change in it."""
        async with self._reading:
            stale = self._sequence - self._view_sequence >= KEPT_CHANGES // 2
            if not self._view or stale:
                await asyncio.to_thread(self._read_all)
            return f'{{"sequence":{self._view_sequence},"view":{self._view}}}'

    async def changes(self, after: int) -> AsyncIterator[Change]:
        """Yield the changes after a sequence number, then each new one."""
        self.readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        try:
            while True:
                kept = [each for each in self._changes if each.sequence > after]
                oldest = self._sequence - len(self._changes)
                if after < oldest or after > self._sequence:
                    yield Change(self._sequence, "reload", "{}")
                    after = self._sequence
                    continue
                for each in kept:
                    yield each
                    after = each.sequence
                async with self._changed:
                    if self._sequence == after:
                        await self._changed.wait()
        finally:
            self.readers -= 1

    async def _follow(self) -> None:
        """Read the folder every second while a page is open."""
        while self.readers:
            await asyncio.sleep(PERIOD_S)
            async with self._reading:
                change = await asyncio.to_thread(self._read_new)
            if change is not None:
                async with self._changed:
                    self._sequence = change.sequence
                    self._changes.append(change)
                    self._changed.notify_all()
        self._task = None

    def _read_all(self) -> None:
        """Make the view. It may hold more than the changes so far; pages skip steps they have."""
        first = self._layout is None and not self._records
        tail = self._tail if first else RunTail(self._path)
        news = tail.read()
        view, layout = view_and_layout(self.name, news, layout=self._layout)
        if first:
            self._layout, self._state = layout, view["state"]
            self._remember(news)
        self._view, self._view_sequence = script_json(view), self._sequence

    def _read_new(self) -> Change | None:
        following = self._sequence + 1
        try:
            news = self._tail.read()
        except (DistmonError, OSError):
            return None  # it may be back the next time
        if news.replaces:
            self._view, self._layout, self._tail = "", None, RunTail(self._path)
            self._records.clear()
            self._alerts.clear()
            return Change(following, "reload", "{}")
        self._remember(news)
        state = state_entry(news, [*self._records], [*self._alerts], time.time())
        if news.records or news.alerts:
            view, layout = view_and_layout(self.name, news, layout=self._layout)
            del view["about"]  # it changes with a new attempt only, and that is a reload
            if self._layout is not None:
                for known in ("names", "shapes", "detailed"):
                    view["params"].pop(known, None)
            self._layout = self._layout or layout
            self._state = view["state"] = state
            return Change(following, "append", script_json(view))
        if state != self._state:
            self._state = state
            return Change(following, "state", script_json(state))
        return None

    def _remember(self, news: News) -> None:
        self._records += news.records
        self._alerts += news.alerts

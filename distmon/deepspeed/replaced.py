"""Attributes of other people's objects that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Replaced:
    """Remembers what was there and puts it back."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make` of what it is now."""
        before = vars(owner).get(name, _ABSENT)
        now = make(getattr(owner, name))
        setattr(owner, name, now)
        self._changes.append((owner, name, before, now))

    def undo(self) -> None:
        """Put everything back, except what somebody else has replaced since."""
        for owner, name, before, now in reversed(self._changes):
            if vars(owner).get(name) is not now:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._changes = []

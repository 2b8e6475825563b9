"""Replace attributes of objects and restore them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """A list of replaced attributes that can be restored."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any, Any]] = []

    def apply(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(owner.name)`."""
        before = vars(owner).get(name, _ABSENT)
        now = make(getattr(owner, name))
        setattr(owner, name, now)
        self._changes.append((owner, name, before, now))

    def undo(self) -> None:
        """Restore all attributes, except those that other code has replaced since."""
        for owner, name, before, now in reversed(self._changes):
            if vars(owner).get(name) is not now:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._changes = []

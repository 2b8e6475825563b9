"""The thread whose models are monitored, where several threads of a process train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class TrainingThread:
    """Keeps apart what several threads do; a loss does not say which model it belongs to.

    Threads that Python has not started, such as those of a backward pass on a device, are part of
    any training. So are threads that take turns with the same model: only one that trains a model
    of its own beside the monitored ones becomes another.
    """

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._here = threading.local()
        self._was_said = False
        self.lock = threading.RLock()
        """Held while optimizers and models are found and attached to."""

    @property
    def stepping(self) -> Any:
        """The optimizer whose step the calling thread is in; None between steps."""
        return getattr(self._here, "stepping", None)

    @stepping.setter
    def stepping(self, optimizer: Any) -> None:
        self._here.stepping = optimizer

    @property
    def is_other(self) -> bool:
        """Whether the calling thread trains models that are not monitored."""
        return getattr(self._here, "is_other", False)

    def claim(self, has_models: bool) -> bool:
        """Return whether a model of the calling thread may be monitored.

        `has_models`: models are monitored already; without any, each thread may begin.
        """
        current = threading.current_thread()
        if isinstance(current, threading._DummyThread):
            return True
        owner = self._owner
        is_free = owner is None or not has_models or not owner.is_alive()
        self._here.is_other = not (is_free or current is owner)
        if not self._here.is_other:
            self._owner = current
        return not self._here.is_other

    def say_once(self, say: Callable[[str], None]) -> None:
        """Say what is not monitored, the first time."""
        if self._was_said or self._owner is None:
            return
        self._was_said = True
        say(
            f"several threads train models at the same time: those of {self._owner.name} are "
            "monitored, those of the other threads are not"
        )

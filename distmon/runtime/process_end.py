"""What a monitor does when its process ends or forks."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """A monitor."""

    closed: bool

    def close(self) -> None:
        """Deliver what is pending."""


def close_at_exit(monitor: Closable) -> None:
    """Close the monitor of a script that ends without doing so, and disable it in forked children.

    A child, as of a data loader, has neither the threads nor the connections of its parent.
    """
    atexit.register(monitor.close)
    reference = weakref.ref(monitor)

    def disable() -> None:
        forked = reference()
        if forked is not None:
            forked.closed = True

    os.register_at_fork(after_in_child=disable)

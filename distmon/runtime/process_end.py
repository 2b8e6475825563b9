"""What a monitor does when its process ends or forks, or its model is gone."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import nn

from distmon.collect.own_hooks import OWNER, Calls


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


def close_with_models(monitor: Closable, models: Iterable[nn.Module]) -> None:
    """Close the monitor of a model that nothing refers to any more, as when the next one is built.

    Otherwise the monitor would keep its parameters, and the memory of the optimizer, to the end of
    the process. The monitor itself holds the whole model by weak references only. What was never
    called, such as a list of modules that was made for `attach`, may go while its modules train.
    """
    reference = weakref.ref(monitor)

    def close(calls: Calls) -> None:
        orphan = reference()
        if orphan is not None and not orphan.closed and calls.any:
            # On a thread: the garbage collector may run this inside of anything, also of a lock.
            threading.Thread(target=orphan.close, name="distmon-close", daemon=True).start()

    for model in models:
        mark = model.__dict__.get(OWNER)
        if mark is not None and mark.owner is monitor:
            weakref.finalize(model, close, mark.calls).atexit = False

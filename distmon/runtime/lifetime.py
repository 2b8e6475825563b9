"""How long a monitor observes, and on which threads: from its first step until it is closed."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress

from torch import nn

from distmon.collect.own_hooks import OWNER, Calls
from distmon.errors import CollectiveError
from distmon.runtime.assembly import Parts
from distmon.runtime.decisions import PATIENCE_S
from distmon.runtime.idle_lane import PythonLane
from distmon.runtime.installed_hooks import InstalledHooks


class Lifetime:
    """Closes a monitor once, on whichever thread: asked to, at exit, or after a failed collective.

    `in_use` is held by the thread that takes observations on, or ends them; `closed` is set under
    it. Both flags are read without it, where one step more does no harm. In a forked child, which
    has neither the threads nor the connections of its parent, the monitor is closed from the start.
    """

    def __init__(self, parts: Parts, lane: PythonLane, hooks: InstalledHooks) -> None:
        self.closed = False
        self.in_use = threading.RLock()
        self.close_is_due = False
        """Another thread has called `close` in a long step, which closes at its end."""
        self._parts = parts
        self._lane = lane
        self._hooks = hooks
        self._training_thread: int | None = None
        """The thread of `step`, from the first step on; only it may take observations on."""
        atexit.register(self.close)  # for a script that ends without closing
        reference = weakref.ref(self)

        def disable() -> None:
            forked = reference()
            if forked is not None:
                forked.closed = True

        os.register_at_fork(after_in_child=disable)

    @property
    def is_other_thread(self) -> bool:
        """Whether this is not the thread that steps: two that poll would launch the same twice."""
        return self._training_thread not in (None, threading.get_ident())

    def begin_step(self) -> bool:
        """Let this thread be the one that steps; False if another one has closed the monitor."""
        if self.closed:
            return False
        self._training_thread = threading.get_ident()
        return True

    def end_monitoring(self, error: CollectiveError) -> None:
        """Continue the training without the monitor."""
        try:
            with self.in_use:
                if not self.closed:
                    self._lane.settle()
                    self._parts.cycle.abandon(error)
                    self.end(deliver=False)
        except Exception as problem:
            self._parts.faults.report("close", problem)

    def close(self) -> None:
        """Close the monitor, or let a long step on another thread do so. Safe to call twice."""
        if not self.closed:
            if not self.in_use.acquire(timeout=PATIENCE_S):
                self.close_is_due = True
                return
            try:
                if not self.closed:
                    self.end()
            finally:
                self.in_use.release()
        self._parts.cycle.join(PATIENCE_S)

    def end(self, deliver: bool = True) -> None:
        """Close the monitor on the thread that has it in use; `deliver` what is pending."""
        self.closed = True
        atexit.unregister(self.close)
        guard = self._parts.faults.guard
        guard("close", self._lane.settle)
        if deliver:
            guard("close", self._flush)
        self._hooks.remove()
        guard("close", self._parts.telemetry.close)
        guard("close", self._parts.cycle.close)

    def _flush(self) -> None:
        try:
            self._parts.cycle.flush()
        except CollectiveError as error:
            self._parts.cycle.abandon(error)

    def end_with(self, models: Iterable[nn.Module], owner: object) -> None:
        """Close the monitor of a model that nothing refers to any more, as when the next is built.

        Otherwise the monitor would keep its parameters, and the memory of the optimizer, to the end
        of the process. The monitor itself holds the whole model by weak references only. What was
        never called, such as a list of modules that was made for `attach`, may go while its modules
        train. `owner`: the monitor that the marks on the models name.
        """
        reference = weakref.ref(self)

        def close(calls: Calls) -> None:
            orphan = reference()
            if orphan is not None and not orphan.closed and calls.any:
                # On a thread: the garbage collector may run this inside of anything, even a lock.
                # Not a daemon: the model of a script goes when its main function returns, and a
                # process that ends meanwhile loses what is being delivered, or never ends.
                with suppress(RuntimeError):  # no thread starts at exit; `atexit` closes
                    threading.Thread(target=orphan.close, name="distmon-close").start()

        for model in models:
            mark = model.__dict__.get(OWNER)
            if mark is not None and mark.owner is owner:
                weakref.finalize(model, close, mark.calls).atexit = False

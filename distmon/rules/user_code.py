"""Call functions of the user's with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from distmon.errors import DistmonError
from distmon.own_threads import OwnThread


class UserCodeTimeoutError(DistmonError):
    """A function of the user's did not return in time; its thread was left behind."""


class UserCode:
    """Calls functions one after another on a daemon thread.

    A thread cannot be ended from outside: one whose function does not return is left behind, and
    the next call gets a thread of its own.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: queue.SimpleQueue[_Call | None] | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result, or raise what the function raised.

        SystemExit and KeyboardInterrupt, which mean something to the training thread only, become
        a DistmonError.
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            OwnThread(_serve, "user-code", args=(self._calls,)).start()
        call = _Call(function, args)
        self._calls.put(call)
        if not call.ended.wait(self._seconds):
            self._calls.put(None)
            self._calls = None
            raise UserCodeTimeoutError(f"did not return within {self._seconds:g} s")
        if call.error is None:
            return call.result
        if isinstance(call.error, Exception):
            raise call.error
        raise DistmonError(f"raised {type(call.error).__name__}") from call.error

    def close(self) -> None:
        """End the thread when its function has returned. Does not wait."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


class _Call:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.result = call.function(*call.args)
        except BaseException as error:
            call.error = error
        call.ended.set()

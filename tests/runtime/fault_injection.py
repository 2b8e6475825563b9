"""Raise an error at any call that the monitor makes. The calls are found by tracing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import distmon

PACKAGE = str(Path(distmon.__file__).parent)
ENTRIES = frozenset({"before_step", "after_step"})
"""Calling the monitor itself is the training's own doing."""
RELEASES = frozenset({"__exit__", "release"})
"""An error in place of the release of a lock is none of the monitor's: no code survives it."""
Call = tuple[str, int, str]
"""File and line of the caller, and what is called."""


class InjectedError(MemoryError):
    """What is raised: an error that no code of the monitor can foresee."""


@contextmanager
def _profiled(profile: Any) -> Iterator[None]:
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _call(frame: FrameType, event: str, arg: Any) -> Call | None:
    """The call that is about to happen, if the monitor's own code makes it."""
    if event == "c_call":
        caller, callee = frame, getattr(arg, "__name__", str(arg))
    elif event == "call" and frame.f_back is not None:
        caller, callee = frame.f_back, frame.f_code.co_name
    else:
        return None
    file = caller.f_code.co_filename
    if not file.startswith(PACKAGE) or callee in ENTRIES | RELEASES:
        return None
    return file.removeprefix(PACKAGE), caller.f_lineno, callee


@contextmanager
def calls_traced(into: dict[Call, None]) -> Iterator[None]:
    """Collect every call, once, in the order of its first appearance."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        found = _call(frame, event, arg)
        if found is not None:
            into.setdefault(found)

    with _profiled(profile):
        yield


class Injection:
    """Raises at the first time that one call is made; None for no call."""

    def __init__(self, target: Call | None) -> None:
        self._target = target
        self.raised = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        target = self._target
        if target is None or self.raised:
            yield
            return
        line = target[1]

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            caller = frame if event == "c_call" else frame.f_back
            if caller is None or caller.f_lineno != line or self.raised:
                return  # quickly: most events
            if _call(frame, event, arg) == target:
                self.raised = True
                raise InjectedError(f"planted at {target}")

        with _profiled(profile):
            yield

"""Faults of the monitor itself: logged once, sent to rank 0, never raised into the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from distmon.errors import CollectiveError

log = logging.getLogger("distmon")
_Result = TypeVar("_Result")


class FaultLog:
    """Logs each kind of fault once and keeps the text that travels with the next observation."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._logged: set[str] = set()
        self._pending = ""

    def report(
        self,
        where: str,
        error: Exception,
        *,
        spoils_observation: bool = False,
        then: str = "continuing without it",
    ) -> None:
        """Note a fault of `where`, and log what happens `then` at its first fault.

        With `spoils_observation` this rank sends the text of the fault instead of numbers.
        """
        if spoils_observation:
            self._pending = f"{where}: {type(error).__name__}: {error}"
            then = "continuing without this observation"
        if where in self._logged:
            return
        self._logged.add(where)
        log.warning(
            "distmon: %s failed on rank %d (%s: %s); %s",
            where,
            self._rank,
            type(error).__name__,
            error,
            then,
            exc_info=log.isEnabledFor(logging.DEBUG),
        )

    def guard(self, where: str, call: Callable[..., _Result], *arguments: object) -> _Result | None:
        """Return the result of `call` with `arguments`; None after a fault, which is reported."""
        try:
            return call(*arguments)
        except Exception as error:
            self.report(where, error)
            return None

    def succeeds(self, where: str, call: Callable[[], object]) -> bool:
        """Return whether `call` succeeds; a fault is reported, a failed collective is raised."""
        try:
            call()
        except CollectiveError:
            raise
        except Exception as error:
            self.report(where, error)
            return False
        return True

    def take_pending(self) -> str:
        """Return the text of the fault that spoils the coming observation, if any, and clear it."""
        text, self._pending = self._pending, ""
        return text

"""The logger of distmon: a log that fails does not fail what is logged."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any


class GuardedLogger(logging.Logger):
    """A handler of the user may raise, or the clock of the entry: the training does not notice."""

    def _log(self, *args: Any, **named: Any) -> None:
        named["stacklevel"] = named.get("stacklevel", 1) + 1  # the caller is not this method
        with suppress(Exception):  # there is no other place to say so
            super()._log(*args, **named)


def guard_logger(name: str) -> None:
    """Let this logger be guarded, also where it has handlers already."""
    logging.getLogger(name).__class__ = GuardedLogger

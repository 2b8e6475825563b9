"""What stays in the training process beside a writer process, off the training thread.

Rules and callbacks that are functions of the user's, sinks that write to the user's own run or
notebook, and printing what the writer has formatted.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
from collections.abc import Callable, Mapping
from queue import Full, Queue
from typing import Any, Final

from rich.console import Console

from distmon.config import MonitorConfig
from distmon.own_threads import OwnThread
from distmon.record.record import Record
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.runtime.worker import OnAlerts
from distmon.sinks import Delivery, SinkFactory
from distmon.sinks.console import print_formatted
from distmon.sinks.gaps import GapLog
from distmon.writer.evaluator import Evaluated

log = logging.getLogger("distmon")
_MOST_TEXTS: Final = 1000
"""Texts that wait while standard output is blocked; of more, newer ones are dropped."""


class TrainingSide:
    """Follows every evaluation of the writer with what only this process can do."""

    def __init__(
        self,
        config: MonitorConfig,
        folder: RunFolder,
        factories: Mapping[str, SinkFactory],
        rules: RuleEngine | None,
        on_alerts: OnAlerts,
        console: Console | None,
        in_notebook: bool,
    ) -> None:
        """`rules` are the user's functions, `console` is what the user has passed.

        `in_notebook`: the output is not text, so the console sink prints from this process.
        """
        self.rules = rules
        self.folder = folder
        self._config = config
        self._factories = factories
        self._on_alerts = on_alerts
        self.console = console
        self._in_notebook = in_notebook
        self._delivery: Delivery | None = None

    @property
    def needs_records(self) -> bool:
        """Whether the writer is to send whole records."""
        return self.rules is not None or self._delivery is not None

    def begin(self, resumed_from: int, world_size: int) -> frozenset[str]:
        """Open the sinks that belong here, once, and return their names."""
        self.folder.note_attempt(resumed_from=resumed_from, world_size=world_size)
        here = {
            name
            for name in self._config.sinks
            if (name == "console" and self._in_notebook) or _in_users_run(name)
        }
        if here and self._delivery is None:
            made = [(name, self._factories[name]) for name in self._config.sinks if name in here]
            self._delivery = Delivery(
                [*dict(made).items()], self._config.queue_size, GapLog(self.folder)
            )
        return frozenset(here)

    def follow(self, evaluated: Evaluated) -> tuple[tuple[Alert, ...], dict[str, Exception]]:
        """Return the alerts of the user's rules, and what failed in the user's functions."""
        record, failed = evaluated.record, dict(evaluated.failures)
        own: list[Alert] = []
        if record is not None and self.rules is not None:
            own, failures = self.rules.evaluate(record)
            failed |= {f"rule {name}": error for name, error in failures.items()}
        alerts = (*evaluated.alerts, *own)
        self._deliver(record, alerts)
        failed.update(self._on_alerts(alerts))
        return tuple(own), failed

    def _deliver(self, record: Record | None, alerts: tuple[Alert, ...]) -> None:
        if self._delivery is not None:
            self._delivery.post(record, alerts)

    def alert(self, alert: Alert) -> None:
        """Deliver an alert before the next record."""
        self._deliver(None, (alert,))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's rules by name."""
        return {} if self.rules is None else dict(self.rules.state_dict()["rules"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `RuleEngine.state_dict` was taken."""
        if self.rules is not None:
            self.rules.load_state_dict(state)

    def close(self) -> None:
        """Flush the sinks."""
        if self._delivery is not None:
            self._delivery.close()


def _in_users_run(sink: str) -> bool:
    """Return whether the training has a run of its own, which only this process can add to.

    Imports nothing: a process with an active run has the package.
    """
    if sink == "wandb":
        return getattr(sys.modules.get("wandb"), "run", None) is not None
    if sink == "mlflow" and "mlflow.tracking.fluent" in sys.modules:
        from distmon.sinks.mlflow import active_run

        return active_run() is not None
    return False


class Printer:
    """Prints texts on a thread of its own: the output may be blocked, unless it is a file."""

    def __init__(self, printed: Callable[[int], None], console: Console | None = None) -> None:
        """`printed` is called after each text with its number; None is standard output."""
        self._printed = printed
        self._console = console
        self._texts: Queue[tuple[int, str] | None] = Queue(_MOST_TEXTS)
        self._thread: OwnThread | None = None
        self._warned = False

    def print(self, number: int, text: str) -> None:
        """Print a text soon. Never blocks; where too many wait, it is dropped."""
        if self._thread is None and _is_file(self._file):
            self._print(number, text)  # no other thread has to wake up for it
            return
        if self._thread is None:
            self._thread = OwnThread(self._run, "print")
            self._thread.start()
        try:
            self._texts.put_nowait((number, text))
        except Full:
            return

    def close(self, seconds: float) -> None:
        """Wait until everything has been printed, at most `seconds`."""
        if self._thread is not None:
            try:
                self._texts.put_nowait(None)
            except Full:
                return
            self._thread.join(seconds)

    @property
    def _file(self) -> Any:
        # Looked up for every text, as `print` does: notebooks and tests redirect it.
        return sys.stdout if self._console is None else self._console.file

    def _run(self) -> None:
        while (item := self._texts.get()) is not None:
            self._print(*item)

    def _print(self, number: int, text: str) -> None:
        try:
            if self._console is not None:
                print_formatted(self._console, text)
            else:
                self._file.write(text)
                self._file.flush()
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning("distmon: the console sink cannot print: %s", error)
        self._printed(number)


def _is_file(stream: Any) -> bool:
    """Return whether a stream writes to a regular file, which does not block as a pipe may."""
    try:
        return type(stream) is io.TextIOWrapper and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False

"""Actions on alerts: call the user's functions, ask for a checkpoint, stop the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from distmon.config import ActionsConfig
from distmon.rules.alert import Alert
from distmon.rules.alert_patterns import first_match
from distmon.runtime.fault_log import FaultLog

STOP_EXIT_CODE: Final = 86
"""Exit code of a process that a rule has ended; not used by shells, signals or sysexits."""

AlertCall = Callable[[Alert], object]


class TrainingStopped(SystemExit):
    """Raised by `Monitor.step` on every rank at the same step when an alert matches `actions.stop`.

    A SystemExit, so that no `except Exception` swallows it and the process ends with code 86
    unless the trainer catches it to clean up. Everything has been delivered by then.
    """

    def __init__(self, alert: Alert) -> None:
        super().__init__(STOP_EXIT_CODE)
        self.alert = alert

    def __str__(self) -> str:
        return f"stopped by {self.alert.rule} at step {self.alert.step}: {self.alert.message}"


@dataclass(frozen=True)
class Callbacks:
    """The user's functions; called on every rank at the same step, after the record is known."""

    on_alert: AlertCall | None = None
    on_checkpoint: AlertCall | None = None


class AlertActions:
    """Acts as configured; every rank has the same alerts and acts alike."""

    def __init__(self, config: ActionsConfig, callbacks: Callbacks, faults: FaultLog) -> None:
        self._config = config
        self._callbacks = callbacks
        self._faults = faults
        self.stopped: TrainingStopped | None = None
        """Raised at the end of the step, once an alert matches `actions.stop`."""

    @property
    def act_in_observed_step(self) -> bool:
        """Whether ranks wait for the evaluation in the observed step itself."""
        return bool(self._config.stop or self._config.checkpoint)

    def act(self, alerts: Sequence[Alert]) -> None:
        """Call the user's functions and decide whether the run ends."""
        for alert in alerts:
            self._call("on_alert", self._callbacks.on_alert, alert)
        wanted = first_match(self._config.checkpoint, alerts)
        if wanted is not None:
            self._call("on_checkpoint", self._callbacks.on_checkpoint, wanted)
        if (reason := first_match(self._config.stop, alerts)) is not None:
            self.stopped = TrainingStopped(reason)

    def _call(self, name: str, function: AlertCall | None, alert: Alert) -> None:
        if function is not None:
            self._faults.guard(name, lambda: function(alert))

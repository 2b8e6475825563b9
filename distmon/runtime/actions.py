"""Actions on alerts: call the user's functions, ask for a checkpoint, stop the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from distmon.config import ActionsConfig
from distmon.errors import DistmonError
from distmon.rules.alert import Alert
from distmon.rules.alert_patterns import first_match
from distmon.rules.user_code import UserCode, UserCodeTimeoutError
from distmon.runtime.decisions import Decision
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
    """The user's functions; see `distmon.attach`."""

    on_alert: AlertCall | None = None
    on_checkpoint: AlertCall | None = None


class AlertActions:
    """Decides on rank 0 what follows from its alerts, and acts on every rank on what it decided."""

    def __init__(
        self,
        config: ActionsConfig,
        callbacks: Callbacks,
        faults: FaultLog,
        user_code: UserCode | None = None,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        self._faults = faults
        self._user_code = user_code or UserCode(seconds=60.0)
        self.stopped: TrainingStopped | None = None
        """Raised at the end of the step, once an alert matches `actions.stop`."""

    @property
    def on_all_ranks(self) -> bool:
        """Whether decisions of rank 0 travel to the other ranks; the same on all ranks."""
        config = self._config
        return bool(config.stop or config.checkpoint or config.on_alert_everywhere)

    def alerted(self, alerts: Sequence[Alert]) -> Mapping[str, Exception]:
        """Call `on_alert` on rank 0, off the training thread; return what failed in it."""
        function = self._callbacks.on_alert
        if function is None or self._config.on_alert_everywhere:
            return {}
        failed: dict[str, Exception] = {}
        for alert in alerts:
            try:
                self._user_code.call(function, alert)
            except Exception as error:
                failed["on_alert"] = error
                if isinstance(error, UserCodeTimeoutError):
                    self._callbacks = replace(self._callbacks, on_alert=None)
                    break
        return failed

    def decide(self, alerts: Sequence[Alert]) -> Decision:
        """Return what all ranks are to do about these alerts."""
        return Decision(
            alerts=tuple(alerts) if self._config.on_alert_everywhere else (),
            checkpoint=first_match(self._config.checkpoint, alerts),
            stop=first_match(self._config.stop, alerts),
        )

    def act(self, decision: Decision) -> None:
        """Call the user's functions and note whether the run ends, on every rank at one step."""
        for alert in decision.alerts:
            self._call("on_alert", self._callbacks.on_alert, alert)
        if decision.checkpoint is not None:
            self._call("on_checkpoint", self._callbacks.on_checkpoint, decision.checkpoint)
        if decision.stop is not None:
            self.stopped = TrainingStopped(decision.stop)

    def _call(self, name: str, function: AlertCall | None, alert: Alert) -> None:
        """Call a function on the training thread; SystemExit in it is a fault like any other."""
        if function is None:
            return
        try:
            function(alert)
        except SystemExit as error:
            self._faults.report(name, DistmonError(f"raised SystemExit({error.code})"))
        except Exception as error:
            self._faults.report(name, error)

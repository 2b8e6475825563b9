"""How observing begins, at the first step of the process: ranks compare, and the output opens."""

from __future__ import annotations

from distmon.runtime.agreement import StartAgreement
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.observer import Observer
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.worker import Evaluation


class RunStart:
    """Compares with the other ranks where this process starts, and begins the run's output.

    No rank waits for the others; until they have answered, nothing is launched.
    """

    def __init__(
        self, observer: Observer, worker: Evaluation, schedule: StepSchedule, faults: FaultLog
    ) -> None:
        self.begun = False
        self.loaded_state = 0
        """Hash of the state that this process has continued from; 0 for none."""
        self._agreement = StartAgreement(observer.ranks)
        self._outbox = observer.outbox
        self._on_device = observer.ranks.on_device
        self._worker = worker
        self._schedule = schedule
        self._faults = faults
        self._output_from: int | None = None
        """The step that the run continues from, until its output has begun."""

    @property
    def pending(self) -> bool:
        """Whether the other ranks have not answered yet."""
        return self._agreement.pending

    def begin(self) -> None:
        """Send where this process starts. Raises CollectiveError when the group is broken."""
        schedule = self._schedule
        self._agreement.begin(
            schedule.completed, schedule.interval, schedule.next_observation, self.loaded_state
        )
        self.begun = True
        self._outbox.held = self._agreement.pending
        self._output_from = max(0, schedule.completed - 1)
        self.begin_output()

    def begin_output(self) -> None:
        """Begin the output, unless it has begun: again at each observation while that fails."""
        if self._output_from is not None and self._faults.succeeds("run folder", self._begin):
            self._output_from = None

    def _begin(self) -> None:
        assert self._output_from is not None
        self._worker.begin(self._output_from)

    def before_observation(self) -> None:
        """Retry the output. What is on a device cannot be held back, so wait for the answers."""
        self.begin_output()
        if self._on_device:
            self._agreement.join()

    def check(self) -> bool:
        """Return whether ranks are known to agree; CollectiveError when they differ."""
        if self._outbox.held:
            self._agreement.check()
            self._outbox.held = self._agreement.pending
        return not self._outbox.held

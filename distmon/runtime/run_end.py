"""How observing ends: what is still pending is recorded, and other ranks are not waited for."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch

from distmon.collect.evaluations import PendingEvaluations
from distmon.collect.losses import Number, host_value, on_host
from distmon.device import DeviceMark
from distmon.runtime.decisions import PATIENCE_S
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.observer import Observer
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.worker import Evaluation
from distmon.sinks.gaps import LastObservation
from distmon.writer.evaluator import Rest

log = logging.getLogger("distmon")
DEVICE_S: Final = PATIENCE_S / 2
"""Longest wait for a device at the end of the run."""
_POLL_SECONDS: Final = 0.0005


class RunEnd:
    """Delivers the last record of rank 0, and closes what the run has opened."""

    def __init__(
        self,
        observer: Observer,
        worker: Evaluation,
        schedule: StepSchedule,
        evaluations: PendingEvaluations,
        faults: FaultLog,
    ) -> None:
        self._observer = observer
        self._worker = worker
        self._schedule = schedule
        self._evaluations = evaluations
        self._faults = faults
        self._asking: threading.Thread | None = None

    def post_rest(self, lr: Number | None, faults: Sequence[str] = ()) -> None:
        """Rank 0: deliver the losses and evaluations that no observation has followed, and faults.

        They are those of this rank: the others have closed already, or will not.
        """
        if self._worker.path is not None:
            self._faults.guard("the last record", lambda: self._post_rest(lr, faults))

    def _post_rest(self, lr: Number | None, faults: Sequence[str]) -> None:
        if not self._device_arrives(lr):
            faults = [*faults, *self._drop_absent()]
            lr = lr if lr is not None and on_host(lr) else None
        after = self._observer.sent + 1
        pending = self._evaluations.take(after)
        listed = self._observer.losses.to_list()
        losses = {step: loss for step, loss in listed if loss is not None}
        if not (pending or losses or faults):
            return
        self._observer.losses.restore(())
        known = None if lr is None else host_value(lr)
        rest = Rest(self._schedule.completed, pending, known, losses, tuple(faults))
        self._worker.finish(rest)
        self._evaluations.arrived(after)

    def _device_arrives(self, lr: Number | None) -> bool:
        """Wait until the device has computed what was reported; return whether it has in time.

        It may never: a collective of the training that other ranks do not enter is not cancelled.
        """
        deadline = time.monotonic() + DEVICE_S
        try:
            conditions = [self._observer.losses.mark(), self._evaluations.there]
            if isinstance(lr, torch.Tensor) and not on_host(lr):
                conditions.append(DeviceMark(lr.device).done)
            while not all(reached() for reached in conditions):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except Exception as error:  # a device that has failed
            self._faults.report("the device", error)
            return False
        return True

    def _drop_absent(self) -> list[str]:
        """Forget what only a device has; return a sentence for each kind."""
        step = self._schedule.completed
        dropped = {
            "losses": self._observer.losses.drop_absent(),
            "evaluations": self._evaluations.drop_absent(),
        }
        return [
            f"{count} {what} up to step {step} are lost: the device did not finish in time"
            for what, count in dropped.items()
            if count
        ]

    def give_up(self, why: str, lost: Sequence[int], lr: Number | None) -> None:
        """Record which observed steps are lost, and which step each rank has reached.

        That is asked for on a thread of its own, which also closes the worker.
        """
        progress, step = self._observer.ranks.progress, self._schedule.completed
        faults = [f"step {each} was not observed: {why}" for each in lost]

        def conclude(steps_of_ranks: str) -> None:
            log.error("distmon: %s", steps_of_ranks)
            self._worker.settle()
            self.post_rest(lr, [*faults, f"observing ended with {steps_of_ranks}"])
            self.close_worker()

        if progress is None:
            conclude(f"rank {self._observer.ranks.rank} at step {step}")
        else:
            self._asking = progress.describe(step, conclude)
            atexit.register(self.join, PATIENCE_S)

    def join(self, seconds: float) -> None:
        """Wait until it is recorded why observing ended, if it did; at most `seconds`."""
        progress = self._observer.ranks.progress
        if self._asking is not None and progress is not None:
            progress.hurry()
            self._asking.join(seconds)

    def close_worker(self) -> None:
        """Deliver everything, and note in the run folder how far this run has observed."""
        outbox = self._observer.outbox
        self._worker.close(LastObservation(outbox.posted, outbox.posted_step))

    def close(self) -> None:
        """End the worker, its output and the process groups."""
        try:
            if self._asking is None:
                self.close_worker()
        finally:
            ranks = self._observer.ranks
            if ranks.progress is not None and self._schedule.begun:
                ranks.progress.publish(self._schedule.completed)
            ranks.close()

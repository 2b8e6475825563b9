"""One observation from its snapshot to its alerts.

armed -> measured -> started -> arrived -> evaluated -> acted on. Armed and measured by the hooks of
the observed step; started in its `step()`, where it is sent without waiting; arrived when
a later `step()` finds it reduced; evaluated on rank 0, off the training thread. What rank 0 decides
travels, and all ranks act on it at the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from distmon.collect.evaluations import PendingEvaluations
from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.losses import Number, host_value, one_number
from distmon.collect.telemetry.rank_telemetry import RankTelemetry
from distmon.errors import CollectiveError
from distmon.record.record import Record
from distmon.rules.nonfinite import immediate_alert
from distmon.runtime.actions import AlertActions, TrainingStopped
from distmon.runtime.arrivals import POLL_SECONDS, Arrivals, FollowUp
from distmon.runtime.decisions import PATIENCE_S, Decision, Decisions, patience_s
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.interval_change import IntervalChange
from distmon.runtime.model_watch import ModelWatch
from distmon.runtime.observer import Observer
from distmon.runtime.run_end import RunEnd
from distmon.runtime.run_start import RunStart
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.worker import Evaluation

Optimizer = torch.optim.Optimizer
log = logging.getLogger("distmon")
MOST_OPTIMIZERS: Final = 8
"""Of more, as with one per parameter, all are measured together in `step()`: each would need a
snapshot and a pass of its own. A gradient that is freed before `step()` is then not measured."""


class ObservationCycle:
    """Takes one observation after another through its stages.

    What goes wrong on this rank is reported to `faults`; only a `CollectiveError` is raised, after
    which this rank cannot observe any more.
    """

    def __init__(
        self,
        *,
        observer: Observer,
        worker: Evaluation,
        schedule: StepSchedule,
        finite_watch: FiniteWatch,
        telemetry: RankTelemetry,
        cost: SelfCost,
        actions: AlertActions,
        faults: FaultLog,
    ) -> None:
        self.observer = observer
        self.worker = worker
        self.evaluations = PendingEvaluations()
        self.lr: Number | None = None
        """The learning rate that the trainer reported last."""
        self._together = len(observer.rows.optimizers) > MOST_OPTIMIZERS
        self._schedule = schedule
        self._finite_watch = finite_watch
        self._telemetry = telemetry
        self._cost = cost
        self._actions = actions
        self._faults = faults
        self.run_start = RunStart(observer, worker, schedule, faults)
        self.decisions = Decisions(observer.ranks, actions.on_all_ranks)
        self.interval_change = IntervalChange()
        follow_up = FollowUp(self.decisions, self.interval_change, actions, cost, faults)
        self.arrivals = Arrivals(
            observer,
            worker,
            self.evaluations,
            finite_watch,
            self.interval_change,
            follow_up,
            faults,
        )
        self._end = RunEnd(observer, worker, schedule, self.evaluations, faults)
        self.join = self._end.join
        self._due = 0
        """Observations that this rank has to send, one for each observed step."""
        self.model_watch = ModelWatch(observer, faults)
        self.armed: list[Optimizer | None] = []
        """Optimizers whose sampled weights were kept in this step; None stands for all of them."""
        self.prepare_step()

    @property
    def steps_may_pass(self) -> bool:
        """Whether no step needs this object until the one before the next observation.

        What is evaluated meanwhile is taken in at that observation: all that follows from it, an
        interval or gradients to read in full, concerns the one after it.
        """
        return not (self.in_flight or self.decisions.enabled)

    @property
    def in_flight(self) -> bool:
        """Whether ranks have not begun, or an observation or a search is on its way."""
        return bool(
            not self.run_start.begun
            or self.arrivals
            or self.run_start.pending
            or self.observer.sent != self._due
            or self.observer.spectra.busy
        )

    def arm(self, optimizer: Optimizer | None) -> None:
        """Keep the sampled weights just before the first step of `optimizer` in this step."""
        if self._together:
            optimizer = None
        if optimizer in self.armed:
            return
        try:
            self.observer.rows.snapshot()
            self.armed.append(optimizer)
        except Exception as error:
            self._faults.report("snapshot", error, spoils_observation=True)

    def measure(self, optimizer: Optimizer | None, ran: bool) -> None:
        """Fill the rows that `optimizer` has just stepped; None for all that are not filled yet."""
        try:
            to_fill, in_full = self.observer.buffers, self.worker.read_in_full
            self.observer.rows.measure(to_fill, optimizer, ran, in_full)
        except Exception as error:
            self._faults.report("measure", error, spoils_observation=True)

    def measure_tasks(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Measure the tasks' gradients; their backward passes leave the gradient gain as it is."""
        with self.observer.gain.paused():
            self.observer.tasks.measure(losses)

    def take_in(self, loss: Number | None, grad_norm: Number | None, lr: Number | None) -> None:
        """Take in the numbers of the completed step; alert at once about a NaN."""
        completed = self._schedule.completed
        if isinstance(loss, torch.Tensor) and loss.is_cpu:
            loss = host_value(loss)  # read once: half of what a step that is not observed costs
        self.observer.losses.add(completed, loss)
        if lr is not None:
            self.lr = one_number(lr)
        self._finite_watch.complete_step(completed, loss, grad_norm)
        if self._finite_watch.evidence is not None and not self._schedule.is_observed:
            self._alert_at_once()

    def _alert_at_once(self) -> None:
        """Alert about the evidence of this rank before the next observation locates it."""
        evidence, severity = self._finite_watch.take_for_alert(), self.worker.severity("nonfinite")
        if evidence is not None and severity is not None:
            rank, located_at = self.observer.ranks.rank, self._schedule.next_observation
            self.worker.alert(immediate_alert(evidence, severity, rank, located_at))

    def run(self) -> None:
        """Take in what has arrived, act on what is decided, start what is observed.

        Each observed step is sent exactly once, whatever fails here, and if it must be at a later
        step: ranks pair their observations by order. What fails here and other ranks depend on is
        a CollectiveError.
        """
        try:
            self._run()
        except CollectiveError:
            raise
        except Exception as error:
            raise CollectiveError(f"{type(error).__name__}: {error}") from error

    def _run(self) -> None:
        if not self.run_start.begun:
            self.run_start.begin()
        observed, since = self._schedule.is_observed, self._schedule.steps_since_observation
        if observed:
            self._schedule.started()
            self._due += 1
            self.run_start.before_observation()
        self._faults.succeeds("arrival", self.advance)
        is_point = self.decisions.is_point(since, observed)
        if is_point and (found := self._exchange_decisions()):
            begin = self._cost.now()
            self._actions.act(found)
            self._cost.exclude_since(begin)  # functions of the user's
        self.model_watch.advance_spectra(begin=observed and self.model_watch.inside_is_due)
        if observed:
            self._faults.succeeds("send", self._send)
            while self.observer.sent < self._due:
                self.observer.send_nothing(self._schedule.completed)
            begin = self._cost.now()
            interval = self.arrivals.wait_for_interval(self._due, self.patience_s)
            self._cost.waited_since(begin)
            if interval is not None:
                self._cost.adopt(interval)
                self.change_interval(interval)
            self._faults.succeeds("arrival", self.advance)

    def _exchange_decisions(self) -> Decision:
        begin = self._cost.now()
        found = self.decisions.exchange(self.patience_s())
        self._cost.waited_since(begin)
        return found

    def advance(self) -> None:
        """Take everything in flight as far as it has come. Never waits."""
        if self.run_start.check():
            self.arrivals.advance()

    def patience_s(self) -> float:
        """Return the longest wait in a step for other ranks, which may be some steps behind."""
        timeout = self.observer.ranks.timeout_s
        return patience_s(self._telemetry.steps.longest_recent, timeout)

    def change_interval(self, interval: int) -> None:
        """Observe every `interval` steps from now on."""
        if interval != self._schedule.interval:
            self._schedule.change_interval(interval)
            self.observer.resize(interval)

    def prepare_step(self) -> None:
        """Arm the hooks of the blocks for the coming step if it is observed, else disarm them."""
        self.armed = []
        if self._schedule.counted:
            self.observer.losses.complete(self._schedule.completed)
        self.model_watch.arm(self._schedule.coming_is_observed, first=not self._schedule.begun)

    def settle(self, seconds: float, device: bool = False) -> bool:
        """Wait until everything is evaluated, at most `seconds`, for a `device` only if asked to.

        Returns whether everything is.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.advance()
            if not (self.run_start.pending or self.arrivals):
                evaluated = self.worker.settle(max(0.0, deadline - time.monotonic()))
                self.advance()
                return evaluated
            if self.observer.outbox.waits_for_device and not device:
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)

    @property
    def known_record(self) -> Record | None:
        """The newest record that this process has; for threads that must not wait for one."""
        return self.arrivals.known_record

    def newest_record(self) -> Record | None:
        """Return the newest record; waits for its evaluation. Other ranks than 0 derive it here."""
        return self.arrivals.newest_record()

    def flush(self) -> None:
        """Deliver what is pending, within a limit, without entering a collective."""
        self.run_start.begin_output()
        self.settle(PATIENCE_S / 2, device=True)
        if self.arrivals:
            self._give_up("not all ranks have sent it")
        else:
            self._end.post_rest(self.lr)

    def stop_together(self, stopped: TrainingStopped) -> None:
        """Return on all ranks when rank 0 has delivered everything.

        A launcher ends all processes as soon as the first one has ended.
        """
        if self.worker.path is not None:
            log.warning("distmon: training is %s", stopped)
            self._faults.guard("stop", lambda: self.settle(PATIENCE_S))
            if not self.arrivals:
                self._end.post_rest(self.lr)
            self._faults.guard("stop", self._end.close_worker)
        try:
            self.decisions.meet(seconds=3 * PATIENCE_S)
        except Exception as error:
            self._faults.report("meeting before the end", error)

    def abandon(self, error: CollectiveError) -> None:
        """Forget what was started: its collectives have failed."""
        log.error(
            "distmon: collectives failed on rank %d (%s); training continues without the monitor",
            self.observer.ranks.rank,
            error,
        )
        self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """Forget what is in flight, and record that it is lost."""
        self._end.give_up(why, self.arrivals.abandon(), self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Waits for the device, and at most a moment for ranks."""
        if not self.settle(PATIENCE_S, device=True):
            self._faults.report("state", TimeoutError("an evaluation has not finished"))
        losses = [*self.observer.losses_in_flight, *self.observer.losses.to_list()]
        return {
            "losses": losses,
            "evaluations": self.evaluations.to_list(),
            **self.worker.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the schedule must have been loaded before."""
        self.worker.settle()
        losses = [
            (int(step), None if loss is None else float(loss)) for step, loss in state["losses"]
        ]
        # What no longer fits before the next observation is averaged right away.
        kept = losses[max(0, len(losses) - self._schedule.steps_since_observation) :]
        early = [loss for _, loss in losses[: len(losses) - len(kept)] if loss is not None]
        self.worker.load_state_dict(state, early)
        self.observer.losses.restore(kept)
        self.evaluations.restore(state["evaluations"])
        self.prepare_step()

    def close(self) -> None:
        """Remove the hooks of the blocks; end the worker, its output and the process groups."""
        self.model_watch.close()
        self._end.close()

    def _send(self) -> None:
        """Send the observation, on every rank, whatever happened here."""
        # What no optimizer has stepped, or what many have stepped.
        self.measure(None, ran=self._together and bool(self.armed))
        step, evidence = self._schedule.completed, None
        self.observer.losses.complete(step)
        slot: dict[str, Number] = {}
        try:
            if self.observer.sample_is_nonfinite:
                self._finite_watch.sampled(step)
            fields, evidence = self._finite_watch.take()
            slot = {**fields, **self._collect_slot()}
        except Exception as error:
            self._faults.report("telemetry", error, spoils_observation=True)
        error_text = self._faults.take_pending()
        slot |= self.interval_change.send(self._due)
        self.observer.start(step, slot, evidence, error_text)

    def _collect_slot(self) -> dict[str, Number]:
        """Return what this rank sends about itself."""
        record_step, record_hash = self.worker.newest_hash
        waited = self.observer.outbox.take_seconds()
        return {
            **self._telemetry.take(),
            **self._cost.take(waited),
            **self.evaluations.take(self._due),
            "monitor_device_seconds": self.observer.rows.device_clock.take(),
            "task_key": self.observer.tasks.key,
            "lr": self.observer.rows.first_lr if self.lr is None else self.lr,
            "monitor_wait_seconds": waited,
            "record_step": float(record_step),
            "record_hash": float(record_hash),
        }

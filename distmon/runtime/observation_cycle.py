"""One observation from its snapshot to its alerts.

armed -> measured -> started -> arrived -> evaluated -> acted on. Armed and measured by the hooks of
the observed step; started in its `step()`, where it is sent and nobody is waited for; arrived when
a later `step()` finds it reduced; evaluated on rank 0, off the training thread. What rank 0 decides
travels, and all ranks act on it at the same step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from distmon.collect.evaluations import PendingEvaluations
from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.losses import Number, host_value, one_number
from distmon.collect.telemetry.rank_telemetry import RankTelemetry
from distmon.errors import CollectiveError
from distmon.record.builder import DIFFERENT
from distmon.record.record import Record
from distmon.rules.nonfinite import immediate_alert
from distmon.runtime.actions import AlertActions, TrainingStopped
from distmon.runtime.agreement import StartAgreement
from distmon.runtime.arrived import Arrived
from distmon.runtime.decisions import PATIENCE_S, Decisions, patience_s
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.interval_change import IntervalChange
from distmon.runtime.observer import Observer
from distmon.runtime.run_end import RunEnd
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.worker import Evaluation
from distmon.writer.evaluator import Evaluated

Optimizer = torch.optim.Optimizer
log = logging.getLogger("distmon")
_POLL_SECONDS: Final = 0.0005
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
        self.known_record: Record | None = None
        """The newest record that this process has; for threads that must not wait for one."""
        self.evaluations = PendingEvaluations()
        self.lr: Number | None = None
        """The learning rate that the trainer reported last."""
        self._together = len(observer.optimizers) > MOST_OPTIMIZERS
        self._schedule = schedule
        self._finite_watch = finite_watch
        self._telemetry = telemetry
        self._cost = cost
        self._actions = actions
        self._faults = faults
        self._start_agreement = StartAgreement(observer.ranks)
        ranks = observer.ranks
        self._decisions = Decisions(ranks.decisions, ranks.rank, ranks.size, actions.on_all_ranks)
        self._interval = IntervalChange()
        self._arrived: deque[Arrived] = deque()
        self._unpacked = 0
        """Number of the newest observation in, or that has been in, `_arrived`."""
        self._held: Arrived | None = None
        self._begun = False
        self._output_from: int | None = None
        """The step that the run continues from, until its output has begun."""
        self.loaded_state = 0
        """Hash of the state that this process has continued from; 0 for none."""
        self._end = RunEnd(observer, worker, schedule, self.evaluations, faults)
        self.join = self._end.join
        self._due = 0
        """Observations that this rank has to send, one for each observed step."""
        self._inside_every = observer.config.inside.every
        self.armed: list[Optimizer | None] = []
        """Optimizers whose sampled weights were kept in this step; None stands for all of them."""
        self.prepare_step()

    @property
    def at_rest(self) -> bool:
        """Whether nothing is in flight, being evaluated, or decided on at fixed steps."""
        return self.steps_may_pass and not self.worker.busy

    @property
    def steps_may_pass(self) -> bool:
        """Whether no step needs this object until the one before the next observation.

        What is evaluated meanwhile is taken in then: all that follows from it, an interval or
        gradients to read in full, concerns the next observation.
        """
        return self._begun and not (
            self.observer.outbox
            or self._arrived
            or self._decisions.enabled
            or self._start_agreement.pending
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
            self.observer.snapshot()
            self.armed.append(optimizer)
        except Exception as error:
            self._faults.report("snapshot", error, spoils_observation=True)

    def measure(self, optimizer: Optimizer | None, ran: bool) -> None:
        """Fill the rows that `optimizer` has just stepped; None for all that are not filled yet."""
        try:
            self.observer.measure(optimizer, ran, self.worker.read_in_full)
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
        if not self._begun:
            self._begin()
        observed, since = self._schedule.is_observed, self._schedule.steps_since_observation
        if observed:
            if self._output_from is not None:  # it failed before
                self._guarded("run folder", self._begin_output)
            self._schedule.started()
            self._due += 1
            if self.observer.ranks.on_device:  # what is on a device cannot be held back
                self._start_agreement.join()
        self._guarded("arrival", self.advance)
        is_point = self._decisions.is_point(since, observed)
        if is_point and (found := self._decisions.exchange(self.patience_s)):
            begin = self._cost.now()
            self._actions.act(found)
            self._cost.exclude_since(begin)  # functions of the user's
        self._advance_spectra(begin=observed and self._measures_inside)
        if observed:
            self._guarded("send", self._start)
            while self.observer.sent < self._due:
                self.observer.send_nothing(self._schedule.completed)
            self._change_interval()
            self._guarded("arrival", self.advance)

    def _begin(self) -> None:
        """Compare with the other ranks, without waiting for them, where this process starts."""
        schedule = self._schedule
        self._start_agreement.begin(
            schedule.completed, schedule.interval, schedule.next_observation, self.loaded_state
        )
        self._begun = True
        self.observer.outbox.held = self._start_agreement.pending
        self._output_from = max(0, schedule.completed - 1)
        self._guarded("run folder", self._begin_output)

    def _begin_output(self) -> None:
        if self._output_from is not None:
            self.worker.begin(self._output_from)
            self._output_from = None

    @property
    def _measures_inside(self) -> bool:
        """Whether the inside of the model is measured at the coming observation, or this one."""
        return (self.observer.sent % self._inside_every) == 0

    def _advance_spectra(self, begin: bool) -> None:
        """Take the estimate of spectral norms on; what fails there ends nothing else."""
        try:
            spectra = self.observer.spectra
            found = spectra.advance()
            if begin and not spectra.busy:
                spectra.begin()
                found = spectra.advance() if found is None else found
            if found is not None:
                self.observer.inside.spectra = found
        except Exception as error:
            self._faults.report("spectra", error)

    def _guarded(self, where: str, call: Callable[[], None]) -> None:
        """Report what fails here; a failed collective is raised."""
        try:
            call()
        except CollectiveError:
            raise
        except Exception as error:
            self._faults.report(where, error)

    def advance(self) -> None:
        """Take everything in flight as far as it has come. Never waits."""
        outbox = self.observer.outbox
        self._start_agreement.check()
        outbox.held = self._start_agreement.pending
        if outbox.held:
            return
        while (landed := outbox.first_arrived()) is not None:
            if landed.number > self._unpacked:
                self._arrived.append(self.observer.unpack(landed))
                self._unpacked = landed.number
            outbox.remove_first()
        while self._arrived and self._arrived[0].search.poll():
            self._hand_over(self._arrived[0])
            self._arrived.popleft()
        for evaluated in self.worker.finished():
            if isinstance(evaluated, Evaluated):
                self._follow(evaluated)
            else:
                self._faults.report("record", evaluated)

    def _hand_over(self, arrived: Arrived) -> None:
        """Give an observation to the evaluation of this rank, once."""
        if arrived.handed_over:
            return
        self._interval.arrive(arrived.number, arrived.fields)
        arrived.handed_over = True
        try:
            observation = arrived.observation(copied=self.worker.reads_later)
            self.evaluations.arrived(arrived.number)
            self._finite_watch.observed(arrived.local.evidence, observation.has_nonfinite)
            if not self.worker.submit(observation):
                raise TimeoutError(f"evaluation is behind: dropped step {observation.step}")
        except Exception as error:
            self._faults.report("record", error)
        # Other ranks than 0 may still derive a record from the newest buffers.
        self._held, before = arrived, self._held
        if before is not None:
            self.observer.outbox.pool.give(before.buffers)

    def _follow(self, evaluated: Evaluated) -> None:
        """Rank 0: decide on what was evaluated."""
        self.known_record = evaluated.record or self.known_record
        for what, error in evaluated.failures.items():
            self._faults.report(what, error)
        for fault in evaluated.faults:
            if DIFFERENT in fault:
                log.error("distmon: %s", fault)
        try:
            self._decisions.decide(self._actions.decide(evaluated.alerts))
            if self._interval.wanted:
                return
            stretch = self._cost.evaluate(evaluated.cost)
            if stretch is not None:
                log.warning("distmon: %s", stretch)
                self._interval.wanted = stretch.after
        except Exception as error:
            self._faults.report("decision", error)

    @property
    def patience_s(self) -> float:
        """Longest wait in a step for other ranks, which may be some steps behind."""
        timeout = self.observer.ranks.timeout_s
        return patience_s(self._telemetry.steps.longest_recent, timeout)

    def _change_interval(self) -> None:
        """Change the interval, at the observation at which all ranks do."""
        begin, patience = time.monotonic(), self.patience_s
        while self._interval.must_wait(self._due):
            if time.monotonic() > begin + patience:
                raise CollectiveError(
                    f"an observation on which the interval depends took over {patience:g} s"
                )
            time.sleep(_POLL_SECONDS)
            self.advance()
        if (interval := self._interval.take(self._due)) is not None:
            self._cost.adopt(interval)
            self.change_interval(interval)

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
        gain, inside = self.observer.gain, self.observer.inside
        observed = self._schedule.coming_is_observed
        if not observed and gain.at_rest and inside.at_rest:
            return
        first = not self._schedule.begun
        for what, hooks, wanted in (
            ("gradient gain", gain, observed),
            ("inside", inside, observed and self._measures_inside),
        ):
            if fault := hooks.take_fault():
                self._faults.report(what, fault)
            try:
                hooks.arm(wanted, first=first)
            except Exception as error:
                self._faults.report(what, error)

    def settle(self, seconds: float, device: bool = False) -> bool:
        """Wait until everything is evaluated, at most `seconds`, for a `device` only if asked to.

        Returns whether everything is.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.advance()
            if not (self._start_agreement.pending or self.observer.outbox or self._arrived):
                evaluated = self.worker.settle(max(0.0, deadline - time.monotonic()))
                self.advance()
                return evaluated
            if self.observer.outbox.waits_for_device and not device:
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def newest_record(self) -> Record | None:
        """Return the newest record; waits for its evaluation. Other ranks than 0 derive it here."""
        self.known_record = self.worker.newest_record
        return self.known_record

    def flush(self) -> None:
        """Deliver what is pending, within a limit, without entering a collective."""
        if self._output_from is not None:
            self._guarded("run folder", self._begin_output)
        self.settle(PATIENCE_S / 2, device=True)
        if self.observer.outbox or self._arrived:
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
            if not (self.observer.outbox or self._arrived):
                self._end.post_rest(self.lr)
            self._faults.guard("stop", self.worker.close)
        try:
            self._decisions.meet(seconds=3 * PATIENCE_S)
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
        lost = [*(each.local.step for each in self._arrived), *self.observer.outbox.abandon()]
        self._arrived.clear()
        self._end.give_up(why, lost, self.lr)

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
        self.observer.gain.remove()
        self.observer.inside.remove()
        self.observer.spectra.close()
        self._end.close()

    def _start(self) -> None:
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
        slot |= self._interval.send(self._due)
        self.observer.start(step, slot, evidence, error_text)

    def _collect_slot(self) -> dict[str, Number]:
        """Return what this rank sends about itself."""
        record_step, record_hash = self.worker.newest_hash
        return {
            **self._telemetry.take(),
            **self._cost.take(),
            **self.evaluations.take(self._due),
            "monitor_device_seconds": self.observer.device_clock.take(),
            "task_key": self.observer.tasks.key,
            "lr": self.observer.first_lr if self.lr is None else self.lr,
            "monitor_wait_seconds": self.observer.outbox.take_seconds(),
            "record_step": float(record_step),
            "record_hash": float(record_hash),
        }

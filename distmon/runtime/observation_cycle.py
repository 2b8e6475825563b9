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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from distmon.collect.evaluations import PendingEvaluations
from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.losses import Number, host_value
from distmon.collect.telemetry.rank_telemetry import RankTelemetry
from distmon.errors import CollectiveError
from distmon.layout.reported import local_loss
from distmon.record.builder import DIFFERENT
from distmon.rules.nonfinite import immediate_alert
from distmon.runtime.actions import AlertActions, TrainingStopped
from distmon.runtime.agreement import StartAgreement
from distmon.runtime.arrived import Arrived, Landed
from distmon.runtime.decisions import PATIENCE_S, Decisions
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.interval_change import IntervalChange
from distmon.runtime.observer import Observer
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.worker import Evaluated, Evaluation
from distmon.sinks.run_output import RunOutput

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
        self._decisions = Decisions(ranks.decisions, ranks.rank, actions.on_all_ranks)
        self._interval = IntervalChange()
        self._landed: deque[Landed] = deque()
        self._arrived: deque[Arrived] = deque()
        self._held: Arrived | None = None
        self._due = 0
        """Observations that this rank has to send, one for each observed step."""
        self.armed: list[Optimizer | None] = []
        """Optimizers whose sampled weights were kept in this step; None stands for all of them."""
        self.prepare_step()

    @property
    def at_rest(self) -> bool:
        """Whether nothing is in flight, being evaluated, or decided on at fixed steps."""
        return not (
            self.observer.outbox
            or self._landed
            or self._arrived
            or self.worker.busy
            or self._decisions.enabled
            or self._start_agreement.pending
            or self.observer.sent != self._due
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
            self.observer.measure(optimizer, ran, self.worker.builder.read_in_full)
        except Exception as error:
            self._faults.report("measure", error, spoils_observation=True)

    def measure_tasks(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Measure the tasks' gradients; their backward passes leave the gradient gain as it is."""
        with self.observer.gain.paused():
            self.observer.tasks.measure(losses)

    def begin_run(self, state_hash: int) -> None:
        """Compare with the other ranks, without waiting for them, where this process starts."""
        schedule = self._schedule
        self._start_agreement.begin(
            schedule.completed, schedule.interval, schedule.next_observation, state_hash
        )
        if self.worker.output is not None:
            self.worker.output.begin(resumed_from=schedule.completed - 1)

    def take_in(self, loss: Number | None, grad_norm: Number | None, lr: Number | None) -> None:
        """Take in the numbers of the completed step; alert at once about a NaN."""
        completed = self._schedule.completed
        if lr is not None:
            self.lr = local_loss(lr)
        if isinstance(loss, torch.Tensor) and loss.is_cpu:
            loss = host_value(loss)  # read once: half of what a step that is not observed costs
        self.observer.losses.add(completed, loss)
        self._finite_watch.complete_step(completed, loss, grad_norm)
        if self._finite_watch.evidence is not None and not self._schedule.is_observed:
            self._alert_at_once()

    def _alert_at_once(self) -> None:
        """Alert about the evidence of this rank before the next observation locates it."""
        evidence, output = self._finite_watch.take_for_alert(), self.worker.output
        severity = self.worker.rules.severity("nonfinite")
        if evidence is not None and output is not None and severity is not None:
            rank, located_at = self.observer.ranks.rank, self._schedule.next_observation
            output.alert(immediate_alert(evidence, severity, rank, located_at))

    def run(self) -> None:
        """Take in what has arrived, act on what is decided, start what is observed.

        Each observed step is sent exactly once, whatever fails here, and if it must be at a later
        step: ranks pair their observations by order.
        """
        observed = self._schedule.is_observed
        self._due += observed
        self._guarded("arrival", self.advance)
        if self._decisions.is_point(self._schedule.steps_since_observation, observed):
            self._exchange_decisions()
        if observed:
            self._guarded("send", self._start)
        while self.observer.sent < self._due:
            self.observer.send_nothing(self._schedule.completed)
        if observed:
            self._change_interval()
            self._guarded("arrival", self.advance)

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
        self._start_agreement.check()
        if self._start_agreement.pending:
            return  # nothing may be launched before ranks know that they launch the same
        self._landed.extend(self.observer.poll())
        while self._landed:
            self._arrived.append(self._landed[0].unpack())
            self._landed.popleft()
        while self._arrived and self._arrived[0].search.poll():
            self._hand_over(self._arrived.popleft())
        for evaluated in self.worker.finished():
            if isinstance(evaluated, Evaluated):
                self._follow(evaluated)
            else:
                self._faults.report("record", evaluated)

    def _hand_over(self, arrived: Arrived) -> None:
        """Give an observation to the evaluation of this rank."""
        try:
            self._interval.arrive(arrived.number, arrived.fields)
            on_rank_0 = self.worker.output is not None
            observation = arrived.observation(copied=on_rank_0)
            self.evaluations.arrived()
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
        for what, error in evaluated.failures.items():
            self._faults.report(what, error)
        for fault in evaluated.record.faults:
            if DIFFERENT in fault:
                log.error("distmon: %s", fault)
        try:
            self._decisions.decide(self._actions.decide(evaluated.alerts))
            if self._interval.wanted:
                return
            stretch = self._cost.evaluate(evaluated.record)
            if stretch is not None:
                log.warning("distmon: %s", stretch)
                self._interval.wanted = stretch.after
        except Exception as error:
            self._faults.report("decision", error)

    def _exchange_decisions(self) -> None:
        """Act on what rank 0 decided until the last exchange; send what it decided since."""
        try:
            # On all ranks: a search takes several exchanges, and each rank has to take part.
            self.settle(PATIENCE_S)
            decision = self._decisions.exchange()
        except CollectiveError:
            raise
        except Exception as error:
            # The other ranks wait for an exchange that this rank has not entered.
            raise CollectiveError(f"decisions: {type(error).__name__}: {error}") from error
        if decision:
            self._actions.act(decision)

    def _change_interval(self) -> None:
        """Change the interval, at the observation at which all ranks do."""
        deadline = time.monotonic() + PATIENCE_S
        while self._interval.must_wait(self._due):
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"an observation on which the interval depends took over {PATIENCE_S:g} s"
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
        gain = self.observer.gain
        observed = self._schedule.coming_is_observed
        if not observed and gain.at_rest:
            return
        if fault := gain.take_fault():
            self._faults.report("gradient gain", fault)
        try:
            gain.arm(observed, first=not self._schedule.begun)
        except Exception as error:
            self._faults.report("gradient gain", error)

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

    def flush(self) -> None:
        """Deliver what is pending, within a limit, without entering a collective."""
        self.settle(PATIENCE_S / 2, device=True)
        output = self.worker.output
        if output is not None and (len(self.evaluations) or len(self.observer.losses)):
            self._faults.guard("the last record", lambda: self._post_rest(output))

    def stop_together(self, stopped: TrainingStopped) -> None:
        """Return on all ranks when rank 0 has delivered everything.

        A launcher ends all processes as soon as the first one has ended.
        """
        if self.worker.output is not None:
            log.warning("distmon: training is %s", stopped)
            self.settle(PATIENCE_S)
            self.worker.output.close()
        try:
            self._decisions.meet(seconds=3 * PATIENCE_S)
        except CollectiveError as error:
            self._faults.report("meeting before the end", error)

    def abandon(self, error: CollectiveError) -> None:
        """Forget what was started: its collectives have failed."""
        ranks, output = self.observer.ranks, self.worker.output
        lost = [*(each.local.step for each in self._arrived), *self.observer.abandon()]
        self._landed.clear()
        self._arrived.clear()
        log.error(
            "distmon: collectives failed on rank %d (%s); training continues without the monitor",
            ranks.rank,
            error,
        )
        if ranks.progress is not None:
            ranks.progress.describe(
                self._schedule.completed, lambda steps: log.error("distmon: %s", steps)
            )
        if output is not None:
            faults = [f"step {step} was not observed: {error}" for step in lost]
            self._faults.guard("the last record", lambda: self._post_rest(output, faults))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Waits for the device, and at most a moment for ranks."""
        if not self.settle(PATIENCE_S):
            self._faults.report("state", TimeoutError("an evaluation has not finished"))
        losses = [*self.observer.losses_in_flight, *self.observer.losses.to_list()]
        return {
            "losses": losses,
            "evaluations": self.evaluations.to_list(),
            "record": self.worker.builder.state_dict(),
            "rules": self.worker.rules.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the schedule must have been loaded before."""
        self.worker.settle()
        self.worker.builder.load_state_dict(state["record"])
        losses = [(int(step), float(loss)) for step, loss in state["losses"]]
        # What no longer fits before the next observation is averaged right away.
        kept = losses[max(0, len(losses) - self._schedule.steps_since_observation) :]
        for _, loss in losses[: len(losses) - len(kept)]:
            self.worker.builder.ema.update(loss)
        self.observer.losses.restore(kept)
        self.evaluations.restore(state["evaluations"])
        self.worker.rules.load_state_dict(state["rules"])
        self.prepare_step()

    def close(self) -> None:
        """Remove the hooks of the blocks; end the worker, its output and the process groups."""
        self.observer.gain.remove()
        self.worker.close()
        try:
            if self.worker.output is not None:
                self.worker.output.close()
        finally:
            ranks = self.observer.ranks
            if ranks.progress is not None and self._schedule.begun:
                ranks.progress.publish(self._schedule.completed)
            ranks.close()

    def _start(self) -> None:
        """Send the observation, on every rank, whatever happened here."""
        # What no optimizer has stepped, or what many have stepped.
        self.measure(None, ran=self._together and bool(self.armed))
        step, evidence = self._schedule.completed, None
        slot: dict[str, Number] = {}
        try:
            if self.observer.sample_is_nonfinite:
                self._finite_watch.sampled(step)
            fields, evidence = self._finite_watch.take()
            slot = {**fields, **self._collect_slot()}
        except Exception as error:
            self._faults.report("telemetry", error, spoils_observation=True)
        error_text = self._faults.take_pending()
        self._schedule.started()
        slot |= self._interval.send(self._due)
        self.observer.start(step, slot, evidence, error_text)

    def _collect_slot(self) -> dict[str, Number]:
        """Return what this rank sends about itself."""
        record_step, record_hash = self.worker.newest_hash
        return {
            **self._telemetry.take(),
            **self._cost.take(),
            **self.evaluations.take(),
            "monitor_device_seconds": self.observer.device_clock.take(),
            "task_key": self.observer.tasks.key,
            "lr": self.observer.first_lr if self.lr is None else self.lr,
            "monitor_wait_seconds": self.observer.outbox.take_seconds(),
            "record_step": float(record_step),
            "record_hash": float(record_hash),
        }

    def _post_rest(self, output: RunOutput, faults: Sequence[str] = ()) -> None:
        """Deliver the losses and evaluations that no observation has followed, and what was lost.

        They are those of this rank: the others have closed already, or will not.
        """
        pending, losses = self.evaluations.take(), dict(self.observer.losses.to_list())
        self.observer.losses.restore(())
        step, builder = self._schedule.completed, self.worker.builder
        lr = None if self.lr is None else host_value(self.lr)
        record = builder.partial_record(step, pending, lr, losses, tuple(faults))
        self.evaluations.arrived()
        alerts, _ = self.worker.rules.evaluate(record)
        output.post(record, alerts)

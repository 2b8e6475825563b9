"""One observation from its snapshot to its alerts.

armed -> measured -> started -> reduced -> evaluated -> acted on. Armed and measured by the hooks of
the observed step; started in its `step()`, where ranks meet; reduced when the numbers are on the
host (at once on a CPU, a fixed number of steps later on an accelerator); evaluated by the worker;
acted on by the training thread at a step that is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from distmon.collect.evaluations import PendingEvaluations
from distmon.collect.finite_watch import Evidence, FiniteWatch
from distmon.collect.losses import Number, host_value
from distmon.collect.telemetry.rank_telemetry import RankTelemetry
from distmon.errors import CollectiveError
from distmon.rules.nonfinite import immediate_alert
from distmon.runtime.actions import AlertActions, TrainingStopped
from distmon.runtime.agreement import agree_on_start
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.observer import Observer
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.worker import EvaluationWorker
from distmon.sinks.run_output import RunOutput

Optimizer = torch.optim.Optimizer
log = logging.getLogger("distmon")


@dataclass(frozen=True)
class InFlight:
    """An observation that was started and not reduced."""

    step: int
    evidence: Evidence | None


class ObservationCycle:
    """Takes one observation after another through its stages.

    What goes wrong on this rank is reported to `faults`; only a `CollectiveError` is raised, after
    which no rank can observe any more.
    """

    def __init__(
        self,
        *,
        observer: Observer,
        worker: EvaluationWorker,
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
        self.lr: float | None = None
        """The learning rate that the trainer reported last."""
        self._schedule = schedule
        self._finite_watch = finite_watch
        self._telemetry = telemetry
        self._cost = cost
        self._actions = actions
        self._faults = faults
        self._in_flight: InFlight | None = None
        self.armed: list[Optimizer | None] = []
        """Optimizers whose sampled weights were kept in this step; None stands for all of them."""
        self.prepare_step()

    @property
    def at_rest(self) -> bool:
        """Whether nothing is started or being evaluated."""
        return self._in_flight is None and not self.worker.pending

    def arm(self, optimizer: Optimizer | None) -> None:
        """Keep the sampled weights just before the first step of `optimizer` in this step."""
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
            self.worker.settle()  # long done, unless steps are very short
            self.observer.measure(optimizer, ran, self.worker.builder.read_in_full)
        except Exception as error:
            self._faults.report("measure", error, spoils_observation=True)

    def measure_tasks(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Measure the tasks' gradients; their backward passes leave the gradient gain as it is."""
        with self.observer.gain.paused():
            self.observer.tasks.measure(losses)

    def begin_run(self) -> None:
        """Agree on the first step of this process. A collective call."""
        self.observer.ranks.take_seconds()  # those of attach
        agree_on_start(self.observer.ranks, self._schedule.completed, self.observer.plan.device)
        if self.worker.output is not None:
            self.worker.output.begin(resumed_from=self._schedule.completed - 1)

    def take_in(self, loss: Number | None, grad_norm: Number | None, lr: Number | None) -> None:
        """Take in the numbers of the completed step; alert at once about a NaN."""
        completed = self._schedule.completed
        if lr is not None:
            self.lr = host_value(lr)
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
        """Act on what was evaluated, start what is observed, reduce what is due."""
        self.act()
        if self._schedule.is_observed:
            if self._in_flight is not None:
                self._reduce()
                self.act()
            self._start()
        if self._in_flight is not None and self._schedule.is_due(self._in_flight.step):
            self._reduce()

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

    def act(self) -> None:
        """Act on a finished evaluation, if there is one; on every rank at the same step."""
        if not self.worker.pending:
            return
        try:
            evaluated = self.worker.take()
            for rule, error in evaluated.failures.items():
                self._faults.report(f"rule {rule}", error)
            self._actions.act(evaluated.alerts)
            stretch = self._cost.evaluate(evaluated.record)
            if stretch is not None:
                if self.observer.ranks.rank == 0:
                    log.warning("distmon: %s", stretch)
                self.change_interval(stretch.after)
        except CollectiveError:
            raise
        except Exception as error:
            self._faults.report("record", error)

    def change_interval(self, interval: int) -> None:
        """Observe every `interval` steps from now on. Nothing may be in flight."""
        if interval != self._schedule.interval:
            self._schedule.change_interval(interval)
            self.observer.resize(interval)

    def flush(self) -> None:
        """Deliver what is pending without entering a collective."""
        self.act()
        if self._in_flight is not None:
            self._reduce(search=False)
            self.act()
        output = self.worker.output
        if output is not None and len(self.evaluations):
            self._faults.guard("evaluations at the end", lambda: self._post_evaluations(output))

    def stop_together(self, stopped: TrainingStopped) -> None:
        """Return on all ranks when rank 0 has delivered everything.

        A launcher ends all processes as soon as the first one has ended.
        """
        if self.worker.output is not None:
            log.warning("distmon: training is %s", stopped)
            self.worker.settle()
            self.worker.output.close()
        with suppress(CollectiveError):
            self.observer.ranks.barrier(self.observer.plan.device)

    def abandon(self, error: CollectiveError) -> None:
        """Forget what was started: its collectives have failed."""
        ranks, self._in_flight = self.observer.ranks, None
        progress = ranks.describe_progress(self._schedule.completed)
        log.error(
            "distmon: collectives failed on rank %d (%s); training continues without the monitor",
            ranks.rank,
            f"{error}; {progress}" if progress else error,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Waits for the worker, and for the device."""
        self.worker.settle()
        in_flight = [] if self._in_flight is None else self.observer.losses_in_flight()
        return {
            "losses": [*in_flight, *self.observer.losses.to_list()],
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
        """Remove the hooks of the blocks; end the worker, its output and the process group."""
        self.observer.gain.remove()
        self.worker.close()
        try:
            if self.worker.output is not None:
                self.worker.output.close()
        finally:
            self.observer.ranks.close()

    def _start(self) -> None:
        """Enter the collectives, on every rank, whatever happened here."""
        self.measure(None, ran=False)  # what no optimizer has stepped
        fields, evidence = self._finite_watch.take()
        slot = {
            **fields,
            **self._telemetry.take(),
            **self._cost.take(),
            **self.evaluations.take(),
            "task_key": self.observer.tasks.send(),
            "lr": self.observer.first_lr if self.lr is None else self.lr,
            "monitor_wait_seconds": self.observer.ranks.take_seconds(),
        }
        step, error = self._schedule.completed, self._faults.take_pending()
        self._schedule.started()
        self.observer.start(step, slot, error)
        self._in_flight = InFlight(step, evidence)

    def _reduce(self, search: bool = True) -> None:
        """Take the reduced numbers and hand them to the worker. Searches are collective."""
        flight, self._in_flight = self._in_flight, None
        assert flight is not None
        try:
            found = self.observer.finish(flight.step, flight.evidence, search)
            self.evaluations.arrived()
            self._finite_watch.observed(flight.evidence, found.has_nonfinite)
            self.worker.submit(found)
            if self._actions.act_in_observed_step:
                self.act()
        except CollectiveError:
            raise
        except Exception as error:
            self._faults.report("record", error)

    def _post_evaluations(self, output: RunOutput) -> None:
        """Deliver the evaluations that no observation has followed."""
        pending = self.evaluations.take()
        record = self.worker.builder.partial_record(self._schedule.completed, pending, self.lr)
        self.evaluations.arrived()
        alerts, _ = self.worker.rules.evaluate(record)
        output.post(record, alerts)

"""The monitor: what a training loop talks to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Self

import torch

from distmon.actions import AlertCall, Callbacks, TrainingStopped, first_match
from distmon.alert import Alert
from distmon.budget import Budget
from distmon.config import ActionsConfig
from distmon.errors import CollectiveError
from distmon.evaluations import PendingEvaluations
from distmon.judging import Judge
from distmon.losses import Number, host_value
from distmon.observer import Observer
from distmon.ownership import scaler_verdict
from distmon.record import Record
from distmon.recording import Recorder
from distmon.reduce import Ranks, minority
from distmon.reporter import Reporter
from distmon.rules import RuleEngine
from distmon.rules.nonfinite import at_once
from distmon.signals import GRAD_NORM, LOSS, Evidence, SignalWatch
from distmon.telemetry.marks import Removable, mark_phases
from distmon.telemetry.rank_row import RankTelemetry
from distmon.telemetry.utilization import Utilization

log = logging.getLogger("distmon")

Optimizer = torch.optim.Optimizer
_STATE_VERSION = 1


class Monitor:
    """Watches one model. Made by `distmon.attach`.

    Call `step()` once per optimizer step, on every rank. A fault inside the monitor is logged once,
    travels to rank 0 with the next observation, and never reaches the training loop.
    """

    def __init__(
        self,
        *,
        interval: int,
        observer: Observer,
        recorder: Recorder,
        watch: SignalWatch,
        rules: RuleEngine,
        ranks: Ranks,
        optimizers: Sequence[Optimizer],
        reporter: Reporter | None,
        pick_up_after: int,
        task_interval: int,
        actions: ActionsConfig,
        callbacks: Callbacks,
        telemetry: RankTelemetry,
        budget: Budget,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval = interval
        self._observer = observer
        self._recorder = recorder
        self._judge = Judge(recorder, rules, reporter)
        self._watch = watch
        self._rules = rules
        self._ranks = ranks
        self._optimizers = optimizers
        self._reporter = reporter
        # The number of steps is fixed, not "when ready": every rank judges a record at one step.
        self._lag = min(pick_up_after, interval)
        self._task_interval = task_interval
        self._actions = actions
        self._callbacks = callbacks
        self._stopped_by: Alert | None = None
        self._evaluations = PendingEvaluations()
        self._tasks_at = 0
        self._now = now
        self._telemetry = telemetry
        self._budget = budget
        self._seconds = self._step_seconds = 0.0
        self._completed = 0
        self._stride = 1
        self._next = interval
        self._begun = False
        self._closed = False
        self._lr: float | None = None
        # One step: what the optimizers did. None stands for "all of them".
        self._snapshots: list[Optimizer | None] = []
        self._ran = False
        self._tells_steps = bool(optimizers)
        # Since the last observation.
        self._skipped = 0
        self._error = ""
        self._told: set[str] = set()
        # An observation that was started and not picked up.
        self._started: int | None = None
        self._shown: Evidence | None = None
        self._lr_then: float | None = None
        self._known_bad = False
        self._handles: list[Removable] = []
        self._watch_next_backward()

    @property
    def utilization(self) -> Utilization:
        """What MFU is computed from."""
        return self._recorder.utilization

    @property
    def last_record(self) -> Record | None:
        """The newest record; the same on every rank. Waits a moment when it is being made."""
        return self._judge.newest_record

    def install_hooks(self) -> None:
        """Let the optimizers call `before_step` and `after_step`."""
        for optimizer in self._optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(lambda o, *_: self.before_step(o)),
                optimizer.register_step_post_hook(lambda o, *_: self.after_step(o)),
            ]

    def install_forward_marks(self, models: Iterable[torch.nn.Module]) -> None:
        """Let the calls of the whole model tell where forward begins and ends."""
        for model in models:
            self._handles += mark_phases(model, self._telemetry.phases)

    # -- what the training loop calls ------------------------------------------------------------

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Just before an optimizer step. Called by the hook, or by a trainer that owns its loop.

        With several optimizers each is measured over its own first step; without an argument all
        are meant.
        """
        self._telemetry.phases.enter("optimizer")
        if self._recorder.utilization.wanted:
            self._recorder.utilization.end_backward()
        if self._completed + self._stride < self._next or self._closed:
            return
        if _contains(self._snapshots, optimizer):
            return
        begin = self._now()
        try:
            self._observer.snapshot()
            self._snapshots.append(optimizer)
        except Exception as error:
            self._fault("snapshot", error)
        self._seconds += self._now() - begin

    def after_step(self, optimizer: Optimizer | None = None) -> None:
        """Just after an optimizer step. Do not call it for a step that was skipped."""
        self._telemetry.phases.enter("other")
        self._ran = self._tells_steps = True
        if scaler_verdict(optimizer) is not None:
            # Only the device knows whether this step counts; the next loss will tell.
            self._watch.skipped(self._completed + self._stride)
        if not self._snapshots or not _contains(self._snapshots, optimizer):
            return
        begin = self._now()
        self._measure(optimizer, ran=True)
        self._seconds += self._now() - begin

    def check(self, *, loss: Number | None = None, grad_norm: Number | None = None) -> None:
        """Show the monitor numbers that cover everything, as soon as they are there.

        Best between computing the total gradient norm and clipping with it: clipping by a NaN norm
        makes every gradient NaN, and the origin is lost. Optional; never waits for the device.
        """
        if self._closed or self._known_bad:
            return
        try:
            self._show(loss, grad_norm, self._completed + self._stride)
        except Exception as error:
            self._fault("check", error, spoils_observation=False)

    def evaluated(
        self, *, val_loss: Number, train_loss: Number | None = None, epoch: float | None = None
    ) -> None:
        """The model was validated. Told with the next record, or at `close`.

        Call it where the loss is known: on one rank or on all, whose mean counts. Without
        `train_loss` the moving average of the training loss stands in.
        """
        if self._closed:
            return
        try:
            self._evaluations.add(self._completed, epoch, train_loss, val_loss)
        except Exception as error:
            self._fault("evaluated", error, spoils_observation=False)

    def task_losses(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Measure how strongly each task pulls at the parameters that they share.

        Call it before the backward pass, at every step on every rank, with unscaled losses by task.
        Every `task_interval` steps it takes the gradient of each, which costs one backward pass per
        task, and leaves `.grad` and the graph as they are.
        """
        coming = self._completed + self._stride
        due = coming // self._task_interval > self._completed // self._task_interval
        # Not in the first step of the process: DDP with a static graph learns its order there.
        if not due or self._closed or not self._begun or self._tasks_at == coming:
            return
        begin = self._now()
        self._tasks_at = coming
        try:
            with self._observer.flow.aside():
                self._observer.tasks.measure(losses)
        except Exception as error:
            self._fault("task_losses", error, spoils_observation=False)
        self._seconds += self._now() - begin

    def phase(self, name: str) -> AbstractContextManager[None]:
        """`with monitor.phase("data"): batch = next(loader)`: say what the time is spent on.

        One of data, forward, backward, communication, optimizer, other. Without it the hooks on
        model and optimizer tell, and everything between two steps counts as data.
        """
        return self._telemetry.phases.told(name)

    def step(
        self,
        *,
        loss: Number | None = None,
        tokens: float | None = None,
        samples: float | None = None,
        lr: float | None = None,
        grad_norm: Number | None = None,
        step: int | None = None,
    ) -> None:
        """A training step is done: call it once per optimizer step, on every rank.

        `loss`, `tokens` and `samples` are this rank's own, of all micro-batches; `step` is the
        trainer's number of this step, when it does not count from 1. On observed steps the ranks
        meet here, and only here.
        """
        if self._closed:
            return
        begin, first = self._now(), not self._begun
        try:
            self._advance(None if step is None else int(step))
            spent = host_value(tokens) if tokens is not None else 0.0
            taken = host_value(samples) if samples is not None else 0.0
            self._telemetry.steps.tick(begin, spent, taken)
            if self._recorder.utilization.wanted:
                self._recorder.utilization.end_step(spent)
            if lr is not None:
                self._lr = host_value(lr)
            self._after_every_step(loss, grad_norm)
        except CollectiveError as error:
            self._give_up(error)
            return
        except Exception as error:
            self._fault("step", error, spoils_observation=False)
        observed = self._completed >= self._next
        idle = not (observed or self._judge.pending or self._started is not None)
        if not idle:
            self._conclude()
            if observed:
                self._observe()
            if self._started is not None and self._completed >= self._started + self._lag:
                self._pick_up()
        self._snapshots, self._ran = [], False
        self._watch_next_backward()
        if self._recorder.utilization.wanted:
            self._recorder.utilization.begin_step()
        self._telemetry.phases.step_done(self._completed + self._stride, self._next)
        passed = self._now() - begin
        self._seconds += passed
        self._step_seconds += passed if idle and not first else 0.0
        if self._stopped_by is not None:
            self._stop(self._stopped_by)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step, loss average, rule states. Plain values, small, and
        independent of the number of ranks; any rank's will do. The losses and evaluations since
        the last observation are this rank's own, and count as if all ranks had them."""
        self._judge.settle()
        in_flight = [] if self._started is None else self._observer.losses_in_flight()
        return {
            "version": _STATE_VERSION,
            "step": self._completed,
            "loss_ema": self._recorder.ema.value,
            "losses": [*in_flight, *self._observer.ring.to_list()],
            "rules": self._rules.state_dict(),
            "known_bad": self._known_bad,
            "evaluations": self._recorder.evaluations.state_dict(),
            "pending_evaluations": self._evaluations.to_list(),
            "gain": [*self._recorder.gain.values],
            "stretch": self._budget.multiple,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on any number of ranks. Call it on every rank.

        The empty state of a monitor that was switched off is taken for a fresh start.
        """
        if not state:
            return
        self._judge.settle()
        self._completed = int(state["step"])
        if (interval := self._budget.resume(int(state.get("stretch", 1)))) != self._interval:
            self._interval = interval
            self._observer.resize(interval)
        self._next = self._next_after(self._completed)
        self._recorder.ema.value = state["loss_ema"]
        losses = [(int(step), float(loss)) for step, loss in state["losses"]]
        # What no longer fits before the next observation goes into the average right away.
        room = self._interval - (self._next - self._completed)
        kept = losses[len(losses) - min(room, len(losses)) :]
        for _, loss in losses[: len(losses) - len(kept)]:
            self._recorder.ema.update(loss)
        self._observer.ring.restore(kept)
        self._rules.load_state_dict(state["rules"])
        self._known_bad = bool(state["known_bad"])
        if "evaluations" in state:
            self._recorder.evaluations.load_state_dict(state["evaluations"])
        self._evaluations.restore(state.get("pending_evaluations", ()))
        self._recorder.gain.restore(state.get("gain", ()))
        self._watch_next_backward()

    def close(self) -> None:
        """Take the hooks off, deliver what is pending, and end the sinks. Safe to call twice.

        It enters no collective: it may run on one rank alone, after an exception.
        """
        if self._closed:
            return
        self._conclude()
        if self._started is not None:
            self._pick_up(search=False)
        self._conclude()
        if len(self._evaluations) and self._reporter is not None:
            self._tell_late(self._reporter)
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._observer.flow.remove()
        self._judge.close()
        self._telemetry.close()
        self.utilization.end_backward()
        try:
            if self._reporter is not None:
                self._reporter.close()
        finally:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one observation -------------------------------------------------------------------------

    def _advance(self, step: int | None) -> None:
        """Take the next step number; the first one of this process is agreed on by all ranks."""
        number = self._completed + 1 if step is None else step
        if self._begun:
            # The hooks of the next step have to know its number beforehand.
            self._stride = max(1, number - self._completed)
            self._completed = number
            return
        self._begun = True
        self._ranks.take_seconds()  # those of attaching
        if number != self._completed + 1:
            self._next = self._next_after(number - 1)
        self._completed = number
        self._agree_on_start()
        if self._reporter is not None:
            self._reporter.begin(resumed_from=number - 1)

    def _agree_on_start(self) -> None:
        mine = torch.tensor([self._completed], device=self._observer.plan.device)
        starts = self._ranks.sum_by_rank(mine).flatten().tolist()
        others = minority(starts)
        if others:
            raise CollectiveError(
                f"rank {', '.join(map(str, others))} goes on from another step than the others "
                f"({[*dict.fromkeys(starts)]}); load the monitor's state on every rank"
            )

    def _show(self, loss: Number | None, grad_norm: Number | None, step: int) -> None:
        if grad_norm is not None:
            self._watch.watch(GRAD_NORM, grad_norm, step)
        if loss is not None:
            self._watch.watch(LOSS, loss, step)

    def _after_every_step(self, loss: Number | None, grad_norm: Number | None) -> None:
        if isinstance(loss, torch.Tensor) and loss.is_cpu:
            loss = host_value(loss)  # read once: half of what a step off the interval costs
        self._observer.ring.add(self._completed, loss)
        if self._tells_steps and not self._ran:
            self._skipped += 1
            self._watch.skipped(self._completed)
        if self._known_bad:
            return
        self._show(loss, grad_norm, self._completed)
        self._watch.poll()
        evidence = self._watch.evidence
        if evidence and not evidence.told and self._completed < self._next:
            evidence.told = True
            severity = self._rules.severity("nonfinite")
            if self._reporter is not None and severity is not None:
                self._reporter.alert(
                    at_once(evidence, severity, rank=self._ranks.rank, told_at=self._next)
                )

    def _watch_next_backward(self) -> None:
        """The hooks of the blocks work before the `step` that belongs to them is called."""
        flow = self._observer.flow
        observed = self._completed + self._stride >= self._next and not self._closed
        if not observed and flow.at_rest:
            return
        if fault := flow.take_fault():
            self._fault("gradient flow", fault, spoils_observation=False)
        try:
            flow.arm(observed, first=not self._begun)
        except Exception as error:
            self._fault("gradient flow", error, spoils_observation=False)

    def _measure(self, optimizer: Optimizer | None, ran: bool) -> None:
        try:
            self._judge.settle()  # long done, unless steps are very short
            self._observer.measure(optimizer, ran, self._recorder.suspects)
        except Exception as error:
            self._fault("measure", error)

    def _observe(self) -> None:
        """Enter the collectives, on every rank, whatever happened here."""
        if self._started is not None:
            self._pick_up()
            self._conclude()
        if self._closed:
            return
        self._measure(None, ran=False)  # what no optimizer has stepped
        evidence = self._shown = self._watch.evidence
        norm = self._watch.take_norm()
        telemetry = {
            **self._telemetry.take(),
            **self._evaluations.take(),
            "task_key": self._observer.tasks.send(),
            "shown_norm": -1.0 if norm is None else norm,
            "signal_step": float(evidence.step if evidence else 0),
            "signal_kind": float(evidence.signal if evidence else 0),
            "skipped_steps": float(self._skipped),
            "monitor_seconds": self._seconds,
            "monitor_step_seconds": self._step_seconds,
            "monitor_wait_seconds": self._ranks.take_seconds(),
        }
        self._seconds = self._step_seconds = 0.0
        self._skipped, self._lr_then = 0, self._lr
        error, self._error = self._error, ""
        self._next = self._next_after(self._completed)
        try:
            self._observer.start(self._completed, telemetry, self._known_bad, error)
            self._started = self._completed
        except CollectiveError as problem:
            self._give_up(problem)

    def _pick_up(self, search: bool = True) -> None:
        """Take what the last observation has found, and let it be judged meanwhile."""
        step, self._started = self._started, None
        assert step is not None
        try:
            found = self._observer.finish(step, self._shown, self._lr_then, search)
            self._evaluations.arrived()
            if self._watch.evidence is self._shown:
                self._watch.evidence = None
            self._known_bad = found.has_nonfinite
            if self._known_bad:
                self._watch.rest()
            self._judge.begin(found)
            if self._actions.stop or self._actions.checkpoint:
                self._conclude()  # whoever wants to act waits for the judgement
        except CollectiveError as error:
            self._give_up(error)
        except Exception as error:
            self._fault("record", error, spoils_observation=False)

    def _conclude(self) -> None:
        """Do what follows from the judgement, if one was begun; on every rank at the same step."""
        if not self._judge.pending:
            return
        try:
            judgement = self._judge.take()
            for rule, error in judgement.failures.items():
                self._fault(f"rule {rule}", error, spoils_observation=False)
            self._act(judgement.alerts)
            self._keep_to_budget(judgement.record)
        except CollectiveError as error:
            self._give_up(error)
        except Exception as error:
            self._fault("record", error, spoils_observation=False)

    def _tell_late(self, reporter: Reporter) -> None:
        """Judge the evaluations that no observation has followed; nobody acts on them any more."""
        try:
            told = self._evaluations.take()
            record = self._recorder.late_record(self._completed, told, self._lr)
            self._evaluations.arrived()
            alerts, _ = self._rules.evaluate(record)
            reporter.post(record, alerts)
        except Exception as error:
            self._fault("evaluations at the end", error, spoils_observation=False)

    def _keep_to_budget(self, record: Record) -> None:
        """Look less often when that costs too much; all ranks have the same record."""
        stretch = self._budget.judge(record)
        if stretch is None:
            return
        if self._reporter is not None:
            log.warning("%s", stretch)
        self._interval = stretch.after
        self._next = self._next_after(self._completed)
        self._observer.resize(stretch.after)

    def _act(self, alerts: Sequence[Alert]) -> None:
        """What the user asked to be done; every rank has the same alerts and does the same."""
        for alert in alerts:
            self._call("on_alert", self._callbacks.on_alert, alert)
        wanted = first_match(self._actions.checkpoint, alerts)
        if wanted is not None:
            self._call("on_checkpoint", self._callbacks.on_checkpoint, wanted)
        self._stopped_by = first_match(self._actions.stop, alerts)

    def _call(self, name: str, function: AlertCall | None, alert: Alert) -> None:
        if function is None:
            return
        try:
            function(alert)
        except Exception as error:
            self._fault(name, error, spoils_observation=False)

    def _stop(self, alert: Alert) -> None:
        """End the run here, on all ranks; none leaves before rank 0 has delivered everything.

        A launcher ends all processes as soon as the first has gone.
        """
        stopped = TrainingStopped(alert)
        if self._reporter is not None:
            log.warning("training is %s", stopped)
            self._judge.settle()
            self._reporter.close()
        with suppress(CollectiveError):
            self._ranks.meet(self._observer.plan.device)
        self.close()
        raise stopped

    def _next_after(self, step: int) -> int:
        return step - step % self._interval + self._interval

    def _fault(self, where: str, error: Exception, spoils_observation: bool = True) -> None:
        """Note a fault of the monitor; training goes on."""
        text = f"{where}: {type(error).__name__}: {error}"
        if spoils_observation:
            self._error = text
        if where not in self._told:
            self._told.add(where)
            log.warning(
                "rank %d: the monitor could not do its part (%s); training goes on",
                self._ranks.rank,
                text,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )

    def _give_up(self, error: CollectiveError) -> None:
        """The ranks can no longer talk to each other: stop monitoring rather than stop training."""
        where = self._ranks.whereabouts(self._completed)
        reason = f"{error} ({where})" if where else str(error)
        log.error(
            "rank %d: monitoring ends here and training goes on: %s", self._ranks.rank, reason
        )
        self._started = None
        self.close()


def _contains(optimizers: Sequence[Optimizer | None], wanted: Optimizer | None) -> bool:
    """Identity, not equality."""
    return any(optimizer is wanted for optimizer in optimizers)

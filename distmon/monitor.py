"""The monitor: what a training loop calls.

A facade: each part owns its state and its `state_dict`; this file guards and delegates. A fault in
the monitor is logged once, travels to rank 0 with the next observation, and never reaches the
training loop.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from distmon.collect.finite_watch import FiniteWatch
from distmon.collect.losses import Number
from distmon.collect.own_hooks import Removable
from distmon.collect.telemetry.model_hooks import install_telemetry_hooks
from distmon.collect.telemetry.rank_telemetry import RankTelemetry
from distmon.device import is_capturing
from distmon.errors import CollectiveError, ConfigError
from distmon.record.record import Record
from distmon.runtime.assembly import Parts
from distmon.runtime.decisions import PATIENCE_S
from distmon.runtime.idle_lane import idle_lane
from distmon.runtime.observation_cycle import ObservationCycle, Optimizer
from distmon.runtime.process_end import close_at_exit, close_with_models
from distmon.runtime.schedule import StepSchedule
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.state import STATE_VERSION, state_hash, upgrade
from distmon.runtime.step_hint import StepHint


class Monitor:
    """Monitors one model. Created by `distmon.attach`.

    Call `step()` once per optimizer step, on every rank. The parts are public attributes, for tools
    and tests; a training loop needs the methods only.
    """

    enabled = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.actions = parts.actions
        self.faults = parts.faults
        self.closed = False
        self._device = parts.cycle.observer.plan.device
        self._hint = StepHint(parts.cycle.observer.ranks.rank)
        self._hooks: list[Removable] = []
        self._exchanged = True
        self._training_thread: int | None = None
        """The thread of `step`, from the first step on; only it may take observations on."""
        self._known_state: dict[str, Any] = {}
        self._in_use = threading.RLock()
        """Held by whoever takes observations on, or ends them: the thread of `step`, or `close`."""
        self._close_is_due = False
        """Another thread has called `close` in a long step, which closes at its end."""
        # A compiler that traced into them, from the hooks of a compiled optimizer step, would
        # recompile at every change of the monitor's state.
        disable: Any = torch.compiler.disable
        names = ("before_step", "after_step", "check", "step")
        own = {name: disable(getattr(self, name)) for name in names}
        self._lane = idle_lane(parts, own, self._hint.step_called, parts.native)
        for name, call in self._lane.calls.items():
            setattr(self, name, call)  # it calls the method unless the step is idle
        close_at_exit(self)

    @property
    def schedule(self) -> StepSchedule:
        """Step numbers, and which steps are observed."""
        self._lane.settle()
        return self._parts.schedule

    @property
    def cycle(self) -> ObservationCycle:
        """The observations, from snapshot to alerts."""
        self._lane.settle()
        return self._parts.cycle

    @property
    def finite_watch(self) -> FiniteWatch:
        """The watch for NaN and Inf in loss and gradient norm."""
        self._lane.settle()
        return self._parts.finite_watch

    @property
    def telemetry(self) -> RankTelemetry:
        """What this rank measures about itself."""
        self._lane.settle()
        return self._parts.telemetry

    @property
    def cost(self) -> SelfCost:
        """The monitor's own time."""
        self._lane.settle()
        return self._parts.cost

    @property
    def last_record(self) -> Record | None:
        """The newest record; the same on every rank, None without one.

        Waits a few seconds at most for an observation that is being reduced or derived, never for a
        device. Other ranks than 0 derive it here. On another thread than that of `step`, as in
        `on_alert`, it waits for nothing: it is the newest one that this process has.
        """
        if self._is_other_thread:
            return self._parts.cycle.known_record
        try:
            with self._in_use:
                if not self.closed:
                    self.cycle.settle(PATIENCE_S)
            return self.cycle.newest_record()
        except CollectiveError as error:
            self._end_monitoring(error)
            return self.cycle.newest_record()
        except Exception as error:
            self.faults.report("last_record", error)
            return None

    @property
    def _is_other_thread(self) -> bool:
        """Whether this is not the thread that steps: two that poll would launch the same twice."""
        return self._training_thread not in (None, threading.get_ident())

    def install_hooks(self) -> None:
        """Let the optimizers call `before_step` and `after_step`."""
        disable: Any = torch.compiler.disable  # see __init__; a compiled entry is never traced
        before = self._lane.calls.get("before_step") or disable(
            lambda optimizer, *_: self.before_step(optimizer)
        )
        after = self._lane.calls.get("after_step") or disable(
            lambda optimizer, *_: self.after_step(optimizer)
        )
        for optimizer in self.cycle.observer.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before))
            self._hooks.append(optimizer.register_step_post_hook(after))

    def install_model_hooks(self, models: Sequence[torch.nn.Module]) -> None:
        """Let the calls of the blocks and of the whole model be observed."""
        self.cycle.observer.gain.install()
        self.cycle.observer.inside.install()
        for hook in install_telemetry_hooks(models, self.telemetry, self):
            self._hooks.append(hook)  # one by one: the next one may raise
        close_with_models(self, models)

    def remove_at_close(self, hook: Removable) -> None:
        """Let `close` remove a hook of an integration, too."""
        self._hooks.append(hook)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Call just before an optimizer step. The hook does, or a trainer that owns its loop.

        With several optimizers each is measured over its own first step; without an argument all
        are meant.
        """
        if self.closed:
            return
        try:
            if is_capturing(self._device):
                return
            self.telemetry.optimizer_begins()
            if self.schedule.coming_is_observed:
                begin = self.cost.now()
                self.cycle.arm(optimizer)
                self.cost.add_since(begin)
        except Exception as error:
            self.faults.report("before_step", error)

    def after_step(self, optimizer: Optimizer | None = None) -> None:
        """Call just after an optimizer step. Do not call it for a skipped step."""
        if self.closed:
            return
        try:
            if is_capturing(self._device):
                self.finite_watch.optimizer_captured()
                return
            self.telemetry.optimizer_ends()
            self._hint.optimizer_stepped(optimizer)
            self.finite_watch.optimizer_stepped(self.schedule.coming, optimizer)
            if optimizer in self.cycle.armed:
                begin = self.cost.now()
                self.cycle.measure(optimizer, ran=True)
                self.cost.add_since(begin)
        except Exception as error:
            self.faults.report("after_step", error)

    def check(self, *, loss: Number | None = None, grad_norm: Number | None = None) -> None:
        """Report the loss or the total gradient norm as soon as it is computed. Optional.

        Best between computing the total gradient norm and clipping with it: clipping by a NaN norm
        makes every gradient NaN, and the origin is lost. Never waits for the device.
        """
        if self.closed:
            return
        try:
            if is_capturing(self._device):
                return
            self.finite_watch.report(self.schedule.coming, loss=loss, grad_norm=grad_norm)
        except Exception as error:
            self.faults.report("check", error)

    def evaluated(
        self, *, val_loss: Number, train_loss: Number | None = None, epoch: float | None = None
    ) -> None:
        """Report a validation. Included in the next record, or flushed by `close`.

        Call it where the loss is known: on one rank, or on all, whose mean counts. Without
        `train_loss` the moving average of the training loss is used.
        """
        if self.closed:
            return
        try:
            self.cycle.evaluations.add(self.schedule.completed, epoch, train_loss, val_loss)
        except Exception as error:
            self.faults.report("evaluated", error)

    def task_losses(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Measure the gradient of each task's loss on the parameters that the tasks share.

        Call it before the backward pass, at every step on every rank, with unscaled losses by task.
        Every `task_interval` steps it costs one backward pass per task; `.grad` and the graph stay
        as they are.
        """
        if self.closed:
            return
        try:
            if self.schedule.take_task_turn():
                begin = self.cost.now()
                with self.telemetry.paused():
                    self.cycle.measure_tasks(losses)
                self.cost.add_since(begin)
        except Exception as error:
            self.faults.report("task_losses", error)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Attribute time to a phase: `with monitor.phase("data"): batch = next(loader)`.

        One of data, forward, backward, communication, optimizer, other. Without it hooks attribute
        time: on model and optimizer, and on every `DataLoader` for data. The rest is `other`.
        """
        return self.faults.guard("phase", lambda: self.telemetry.phases.named(name)) or (
            nullcontext()
        )

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
        """Complete a training step: call it once per optimizer step, on every rank.

        `loss`, `tokens` and `samples` are this rank's own, of all micro-batches; `step` is the
        trainer's number of this step, when it does not count from 1. What ranks exchange is
        launched and taken in here; no rank waits for another one.
        """
        if self.closed:
            return
        before, self._exchanged = self._parts.schedule.counted, False
        try:
            with self._in_use:
                self._training_thread = threading.get_ident()
                self.faults.guard("step", self._lane.settle)
                self._step(step, tokens, samples, (loss, grad_norm, lr))
                self._hint.step_called()
        except CollectiveError as error:
            self._end_monitoring(error)
        except Exception as error:
            self.faults.report("step", error)
            self._make_up_for_step(before)
        if self._close_is_due and not self.closed:
            self._close()
        if (stopped := self.actions.stopped) is not None and not self.closed:
            self.cycle.stop_together(stopped)
            self.close()
            raise stopped

    def _step(
        self,
        step: int | None,
        tokens: Number | None,
        samples: Number | None,
        signals: tuple[Number | None, Number | None, Number | None],
    ) -> None:
        """Complete a step: each part is done whatever happens in the others."""
        if self.closed:  # by another thread
            return
        schedule, first, before = self.schedule, not self.schedule.begun, self.schedule.counted
        begin = time.perf_counter()
        self.faults.guard("step", lambda: schedule.advance(step))
        if schedule.counted == before:
            schedule.advance_anyway()  # counted on all ranks, whatever failed on this one
        self.faults.guard("step", lambda: self.telemetry.step_ends(begin, tokens, samples))
        self.faults.guard("step", lambda: self.cycle.take_in(*signals))
        idle = self.cycle.at_rest and not schedule.is_observed
        if not idle:
            self.cycle.run()
        self._exchanged = True
        self.faults.guard("step", self.cycle.prepare_step)
        self.faults.guard("step", self._begin_step)
        self.cost.add_step(begin, idle=idle and not first)
        self._lane.open()

    def _begin_step(self) -> None:
        self.telemetry.step_begins(self.schedule.coming, self.schedule.next_observation)

    def _make_up_for_step(self, before: int) -> None:
        """Do after an error what other ranks count on: the step counts, and it is exchanged."""
        try:
            with self._in_use:
                if self.schedule.counted == before:
                    self.schedule.advance_anyway()
                self.cycle.observer.losses.complete(self.schedule.completed)
                if not (self._exchanged or self.closed):
                    self.cycle.run()
        except Exception as error:
            self._end_monitoring(CollectiveError(f"{type(error).__name__}: {error}"))

    def _end_monitoring(self, error: CollectiveError) -> None:
        """Continue the training without the monitor."""
        try:
            with self._in_use:
                if not self.closed:
                    self.cycle.abandon(error)
                    self._close(deliver=False)
        except Exception as problem:
            self.faults.report("close", problem)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values, small, independent of the number of ranks.

        Save that of rank 0: only rank 0 has the memory of the rules. The losses and evaluations
        since the last observation are this rank's own, and count as if all ranks had them. On
        another thread than that of `step` it is the state that was returned last.
        """
        if self._is_other_thread:
            return self._last_state()
        try:
            with self._in_use:
                cycle = self.cycle.state_dict()
            self._known_state = {
                "version": STATE_VERSION,
                "schedule": self.schedule.state_dict(),
                "finite_watch": self.finite_watch.state_dict(),
                "cost": self.cost.state_dict(),
                "cycle": cycle,
            }
            return dict(self._known_state)
        except CollectiveError as error:
            self._end_monitoring(error)
        except Exception as error:
            self.faults.report("state", error, then="a run that resumes starts with a fresh one")
        return {}

    def _last_state(self) -> dict[str, Any]:
        if not self._known_state:
            error = RuntimeError(
                "state_dict was called on another thread than step, and only there"
            )
            self.faults.report("state", error, then="a run that resumes starts with a fresh one")
        return dict(self._known_state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on any number of ranks. Call it on every rank.

        The empty state of a disabled monitor is a fresh start. So is one that cannot be read: it
        is logged, and nothing of it is loaded.
        """
        before = self.state_dict()
        try:
            if state:
                self._load(upgrade(state))
                self.cycle.loaded_state = state_hash(state)
        except Exception as error:
            self.faults.report("loading the state", error, then="continuing from a fresh state")
            self.faults.guard("loading the state", lambda: self._load(before))

    def plot(self) -> Any:
        """Return a plotly figure of the run so far, for a notebook; on rank 0 only."""
        from distmon.report.notebook import plot_run

        path = self.cycle.worker.path
        if path is None:
            raise ConfigError("monitor.plot() works on rank 0, which writes the run folder")
        return plot_run(path)

    def close(self) -> None:
        """Remove the hooks, deliver what is pending, and close the sinks. Safe to call twice.

        It enters no collective: it may run on one rank alone, after an exception, and on another
        thread than `step`. In a step that takes long it returns, and the step closes at its end.
        """
        if not self.closed:
            if not self._in_use.acquire(timeout=PATIENCE_S):
                self._close_is_due = True
                return
            try:
                if not self.closed:
                    self._close()
            finally:
                self._in_use.release()
        self.cycle.join(PATIENCE_S)

    def _close(self, deliver: bool = True) -> None:
        self.closed = True
        atexit.unregister(self.close)
        if deliver:
            self.faults.guard("close", self._flush)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.faults.guard("close", self.telemetry.close)
        self.faults.guard("close", self.cycle.close)

    def _flush(self) -> None:
        try:
            self.cycle.flush()
        except CollectiveError as error:
            self.cycle.abandon(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, state: Mapping[str, Any]) -> None:
        self.cycle.worker.settle()
        self.cycle.change_interval(self.cost.load_state_dict(state["cost"]))
        self.schedule.load_state_dict(state["schedule"])
        self.finite_watch.load_state_dict(state["finite_watch"])
        self.cycle.load_state_dict(state["cycle"])

"""The monitor: what a training loop calls.

A facade: each part owns its state and its `state_dict`; this file guards and delegates. A fault in
the monitor is logged once, travels to rank 0 with the next observation, and never reaches the
training loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from distmon.collect.losses import Number
from distmon.collect.own_hooks import Removable
from distmon.device import is_capturing
from distmon.errors import CollectiveError, ConfigError
from distmon.record.record import Record
from distmon.runtime.assembly import Parts
from distmon.runtime.decisions import PATIENCE_S
from distmon.runtime.idle_lane import idle_lane
from distmon.runtime.installed_hooks import InstalledHooks, untraced
from distmon.runtime.lifetime import Lifetime
from distmon.runtime.observation_cycle import Optimizer
from distmon.runtime.saved_state import SavedState
from distmon.runtime.settled_parts import SettledParts
from distmon.runtime.step_completion import StepCompletion
from distmon.runtime.step_hint import StepHint


class Monitor(SettledParts):
    """Monitors one model. Created by `distmon.attach`.

    Call `step()` once per optimizer step, on every rank. The parts are public attributes, for tools
    and tests; a training loop needs the methods only.
    """

    enabled = True

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.actions = parts.actions
        self.faults = parts.faults
        self._device = parts.cycle.observer.rows.device
        self._hint = StepHint(parts.cycle.observer.ranks.rank)
        self._saved = SavedState(parts)
        names = ("before_step", "after_step", "check", "step")
        own = {name: untraced(getattr(self, name)) for name in names}
        prepare, stepped = untraced(self._prepare_step), self._hint.step_called
        self.lane = idle_lane(parts, own, prepare, stepped, parts.native)
        for name, call in self.lane.calls.items():
            setattr(self, name, call)  # it calls the method unless the step is idle
        self.hooks = InstalledHooks()
        self.lifetime = Lifetime(parts, self.lane, self.hooks)
        self._completion = StepCompletion(parts, self.lane, self.lifetime, stepped)

    @property
    def closed(self) -> bool:
        """Whether nothing is observed any more."""
        return self.lifetime.closed

    @property
    def last_record(self) -> Record | None:
        """The newest record; the same on every rank, None without one.

        Waits a few seconds at most for an observation that is being reduced or derived, never for a
        device. Other ranks than 0 derive it here. On another thread than that of `step`, as in
        `on_alert`, it waits for nothing: it is the newest one that this process has.
        """
        if self.lifetime.is_other_thread:
            return self.parts.cycle.known_record
        try:
            with self.lifetime.in_use:
                if not self.lifetime.closed:
                    self.cycle.settle(PATIENCE_S)
            return self.cycle.newest_record()
        except CollectiveError as error:
            self.lifetime.end_monitoring(error)
            return self.cycle.newest_record()
        except Exception as error:
            self.faults.report("last_record", error)
            return None

    def install_hooks(self) -> None:
        """Let the optimizers call `before_step` and `after_step`."""
        optimizers = self.cycle.observer.rows.optimizers
        self.hooks.install_on_optimizers(optimizers, self, self.lane.calls)

    def install_model_hooks(self, models: Sequence[torch.nn.Module]) -> None:
        """Let the calls of the blocks and of the whole model be observed."""
        self.hooks.install_on_models(models, self.parts, self)
        self.lifetime.end_with(models, self)

    def remove_at_close(self, hook: Removable) -> None:
        """Let `close` remove a hook of an integration, too."""
        self.hooks.add(hook)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Call just before an optimizer step. The hook does, or a trainer that owns its loop.

        With several optimizers each is measured over its own first step; without an argument all
        are meant.
        """
        if self.lifetime.closed:
            return
        try:
            if is_capturing(self._device):
                return
            self.lane.settle()
            parts, begin = self.parts, time.perf_counter()
            parts.telemetry.optimizer_begins()
            observed = parts.schedule.coming_is_observed
            if observed:
                parts.cycle.arm(optimizer)
            parts.cost.add_call(begin, idle=not observed)
        except Exception as error:
            self.faults.report("before_step", error)

    def after_step(self, optimizer: Optimizer | None = None) -> None:
        """Call just after an optimizer step. Do not call it for a skipped step."""
        if self.lifetime.closed:
            return
        try:
            if is_capturing(self._device):
                self.finite_watch.optimizer_captured()
                return
            self.lane.settle()
            parts, begin = self.parts, time.perf_counter()
            parts.telemetry.optimizer_ends()
            self._hint.optimizer_stepped(optimizer)
            parts.finite_watch.optimizer_stepped(parts.schedule.coming, optimizer)
            if optimizer in parts.cycle.armed:
                parts.cycle.measure(optimizer, ran=True)
            parts.cost.add_call(begin, idle=not parts.schedule.coming_is_observed)
        except Exception as error:
            self.faults.report("after_step", error)

    def check(self, *, loss: Number | None = None, grad_norm: Number | None = None) -> None:
        """Report the loss or the total gradient norm as soon as it is computed. Optional.

        Best between computing the total gradient norm and clipping with it: clipping by a NaN norm
        makes every gradient NaN, and the origin is lost. Never waits for the device.
        """
        if self.lifetime.closed:
            return
        try:
            if not is_capturing(self._device):
                begin = time.perf_counter()
                self.finite_watch.report(self.schedule.coming, loss=loss, grad_norm=grad_norm)
                self.parts.cost.add_call(begin, idle=True)
        except Exception as error:
            self.faults.report("check", error)

    def evaluated(
        self, *, val_loss: Number, train_loss: Number | None = None, epoch: float | None = None
    ) -> None:
        """Report a validation. Included in the next record, or flushed by `close`.

        Call it where the loss is known: on one rank, or on all, whose mean counts. Without
        `train_loss` the moving average of the training loss is used.
        """
        if self.lifetime.closed:
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
        if self.lifetime.closed:
            return
        try:
            if self.schedule.take_task_turn():
                with self.cost.counted(), self.telemetry.paused():
                    self.cycle.measure_tasks(losses)
        except Exception as error:
            self.faults.report("task_losses", error)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Attribute time to a phase: `with monitor.phase("data"): batch = next(loader)`.

        One of data, forward, backward, communication, optimizer, other. Without it hooks attribute
        time: on model and optimizer, and on every `DataLoader` for data. The rest is `other`.
        """
        try:
            return self.parts.telemetry.phases.named(name)
        except Exception as error:
            self.faults.report("phase", error)
            return nullcontext()

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
        if self.lifetime.closed:
            return
        counted, self._completion.exchanged = self.parts.schedule.counted, False
        try:
            with self.lifetime.in_use:
                if self.lifetime.begin_step():
                    self._completion.complete(step, tokens, samples, (loss, grad_norm, lr))
        except CollectiveError as error:
            self.lifetime.end_monitoring(error)
        except Exception as error:
            self.faults.report("step", error)
            self._completion.make_up(counted)
        if self.lifetime.close_is_due and not self.lifetime.closed:
            self.lifetime.end()
        if (stopped := self.actions.stopped) is not None and not self.lifetime.closed:
            self.cycle.stop_together(stopped)
            self.close()
            raise stopped

    def _prepare_step(self) -> None:
        """Prepare the coming step after one that the lane has counted."""
        if self.lifetime.closed:
            return
        try:
            with self.lifetime.in_use:
                if self.lifetime.begin_step():
                    self._completion.prepare()
        except Exception as error:
            self.faults.report("step", error)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain values, small, independent of the number of ranks.

        Save that of rank 0: only rank 0 has the memory of the rules. The losses and evaluations
        since the last observation are this rank's own, and count as if all ranks had them. On
        another thread than that of `step` it is the state that was returned last.
        """
        try:
            if self.lifetime.is_other_thread:
                return self._saved.last()
            with self.lifetime.in_use:
                self.lane.settle()
                return self._saved.collect()
        except CollectiveError as error:
            self.lifetime.end_monitoring(error)
        except Exception as error:
            self.faults.report("state", error, then="a run that resumes starts with a fresh one")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on any number of ranks. Call it on every rank.

        The empty state of a disabled monitor is a fresh start. So is one that cannot be read: it
        is logged, and nothing of it is loaded.
        """
        try:
            if not state:
                return
            with self.lifetime.in_use:
                self.lane.settle()
                self._saved.load(state)
        except CollectiveError as error:
            self.lifetime.end_monitoring(error)
        except Exception as error:
            self.faults.report("loading the state", error, then="continuing from a fresh state")

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
        self.lifetime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

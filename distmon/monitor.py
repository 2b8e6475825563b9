"""The monitor: what a training loop talks to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.hooks import RemovableHandle

from distmon.observer import Observer
from distmon.ownership import managed_by_scaler
from distmon.record import Record
from distmon.reduce import Ranks
from distmon.reporter import Reporter
from distmon.rules import RuleEngine
from distmon.rules.nonfinite import at_once
from distmon.signals import Evidence, SignalWatch
from distmon.telemetry.step_clock import StepClock

log = logging.getLogger("distmon")

Number = float | torch.Tensor
Optimizer = torch.optim.Optimizer
_LOSS, _GRAD_NORM = 1, 2
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
        watch: SignalWatch,
        rules: RuleEngine,
        ranks: Ranks,
        optimizers: Sequence[Optimizer],
        reporter: Reporter | None,
        pick_up_after: int,
        enabled: bool = True,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval = interval
        self._observer = observer
        self._watch = watch
        self._rules = rules
        self._ranks = ranks
        self._optimizers = optimizers
        self._reporter = reporter
        # The number of steps is fixed, not "when ready": every rank judges a record at one step.
        self._lag = min(pick_up_after, interval)
        self._now = now
        self._clock = StepClock(now)
        self._seconds = 0.0
        self._completed = 0
        self._next = interval
        self._begun = False
        self._closed = not enabled
        self._lr: float | None = None
        # One step: what the optimizer hooks saw.
        self._snapshot_taken = False
        self._measured = False
        self._stepped: list[Optimizer] = []
        self._ran = False
        self._scaler_decides = False
        # Since the last observation.
        self._skipped = 0
        self._error = ""
        self._told: set[str] = set()
        self._started: int | None = None
        self._shown: Evidence | None = None
        self._known_bad = False
        self.last_record: Record | None = None
        """The newest record; the same on every rank."""
        self._handles: list[RemovableHandle] = []

    def install_hooks(self) -> None:
        """Let the optimizers call `before_step` and `after_step`."""
        for optimizer in self._optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(lambda o, *_: self.before_step(o)),
                optimizer.register_step_post_hook(lambda o, *_: self.after_step(o)),
            ]

    # -- what the training loop calls ------------------------------------------------------------

    def before_step(self, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002
        """Just before an optimizer step. Called by the hook, or by a trainer that owns its loop."""
        if self._completed + 1 != self._next or self._snapshot_taken or self._closed:
            return
        begin = self._now()
        try:
            self._observer.snapshot()
            self._snapshot_taken = True
        except Exception as error:
            self._fault("snapshot", error)
        self._seconds += self._now() - begin

    def after_step(self, optimizer: Optimizer | None = None) -> None:
        """Just after an optimizer step. Without an argument: all optimizers have stepped."""
        self._ran = True
        if managed_by_scaler(optimizer):
            self._scaler_decides = True
        if not self._snapshot_taken or self._measured:
            return
        begin = self._now()
        ran = self._optimizers if optimizer is None else [optimizer]
        self._stepped += [o for o in ran if not any(o is s for s in self._stepped)]
        if len(self._stepped) >= len(self._optimizers):
            self._measure()
        self._seconds += self._now() - begin

    def check(self, *, loss: Number | None = None, grad_norm: Number | None = None) -> None:
        """Show the monitor numbers that cover everything, as soon as they are there.

        Best between computing the total gradient norm and clipping with it: clipping by a NaN norm
        makes every gradient NaN, and the origin is lost. Optional; never waits for the device.
        """
        if self._closed or self._known_bad:
            return
        try:
            if grad_norm is not None:
                self._watch.watch(_GRAD_NORM, grad_norm, self._completed + 1)
            if loss is not None:
                self._watch.watch(_LOSS, loss, self._completed + 1)
        except Exception as error:
            self._fault("check", error)

    def step(
        self,
        *,
        loss: Number | None = None,
        tokens: float | None = None,
        lr: float | None = None,
        grad_norm: Number | None = None,
        step: int | None = None,
    ) -> None:
        """A training step is done: call it once per optimizer step, on every rank.

        `loss` and `tokens` are this rank's own; `step` is the trainer's number of this step when it
        does not simply count up. On observed steps the ranks meet here, and only here.
        """
        if self._closed:
            return
        begin = self._now()
        if not self._begun:
            self._begin(step)
        self._completed = self._completed + 1 if step is None else step
        self._clock.tick(tokens)
        self._lr = lr if lr is not None else self._lr
        try:
            self._after_every_step(loss, grad_norm)
        except Exception as error:
            self._fault("step", error)
        if self._completed >= self._next:
            self._observe()
        if self._started is not None and self._completed >= self._started + self._lag:
            self._collect()
        self._snapshot_taken = self._measured = self._ran = self._scaler_decides = False
        self._stepped = []
        self._seconds += self._now() - begin

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step, loss average, rule states. The same on every rank but for
        the newest losses; small, and independent of the number of ranks."""
        return {
            "version": _STATE_VERSION,
            "step": self._completed,
            "loss_ema": self._observer.ema.value,
            "losses": self._observer.ring.to_list(),
            "rules": self._rules.state_dict(),
            "known_bad": self._known_bad,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, on any number of ranks."""
        self._completed = int(state["step"])
        self._next = self._next_after(self._completed)
        self._observer.ema.value = state["loss_ema"]
        losses = list(state["losses"])
        # With a shorter interval than before, the oldest losses go into the average right away.
        room = self._interval - (self._next - self._completed)
        for loss in losses[: max(0, len(losses) - room)]:
            if loss is not None:
                self._observer.ema.update(loss)
        self._observer.ring.restore(losses[len(losses) - min(room, len(losses)) :])
        self._rules.load_state_dict(state["rules"])
        self._known_bad = bool(state["known_bad"])

    def close(self) -> None:
        """Take the hooks off, deliver what is pending, and end the sinks. Safe to call twice."""
        if self._closed:
            return
        if self._started is not None:
            self._collect()
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._reporter is not None:
            self._reporter.close()
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

    def _begin(self, step: int | None) -> None:
        """The first step of this process: only now is it known where the run goes on."""
        self._begun = True
        if step is not None and step != self._completed + 1:
            self._completed = step - 1
            self._next = self._next_after(self._completed)
        try:
            if self._reporter is not None:
                self._reporter.begin(resumed_from=self._completed)
        except Exception as error:
            self._fault("run folder", error)

    def _after_every_step(self, loss: Number | None, grad_norm: Number | None) -> None:
        self._observer.ring.add(loss)
        if not self._ran:
            self._skipped += 1
        if self._known_bad:
            return
        if loss is not None:
            self._watch.watch(_LOSS, loss, self._completed)
        if grad_norm is not None:
            self._watch.watch(_GRAD_NORM, grad_norm, self._completed)
        self._watch.poll()
        if not self._ran or self._scaler_decides:
            # A GradScaler skips steps whose gradients overflow: that is its job, not a fault.
            self._watch.forget(self._completed, _GRAD_NORM)
        evidence = self._watch.evidence
        if evidence and not evidence.told and self._completed < self._next:
            evidence.told = True
            if self._reporter is not None:
                self._reporter.alert(
                    at_once(
                        evidence.step, evidence.what, evidence.value, self._ranks.rank, self._next
                    )
                )

    def _measure(self) -> None:
        try:
            self._observer.measure(self._stepped, self._ran and self._snapshot_taken)
        except Exception as error:
            self._fault("measure", error)
        self._measured = True

    def _observe(self) -> None:
        """Enter the collectives, on every rank, whatever happened here."""
        if self._started is not None:
            self._collect()
        if not self._measured:
            self._measure()
        if self._error:
            self._observer.clear()
        evidence = self._shown = self._watch.evidence
        telemetry = {
            **self._clock.take(),
            "time": time.time(),
            "signal_step": float(evidence.step if evidence else 0),
            "signal_kind": float(evidence.signal if evidence else 0),
            "skipped_steps": float(self._skipped),
            "monitor_seconds": self._seconds,
        }
        self._seconds = 0.0
        self._skipped = 0
        try:
            self._observer.start(self._completed, telemetry, self._error)
            self._started = self._completed
        except Exception as error:
            self._give_up(error)
        self._error = ""
        self._next = self._next_after(self._completed)

    def _collect(self) -> None:
        """Pick up the record of the last observation, judge it, hand it to the sinks."""
        step, self._started = self._started, None
        assert step is not None
        try:
            record = self._observer.finish(step, self._shown, self._known_bad, self._lr)
        except Exception as error:
            self._give_up(error)
            return
        try:
            self._known_bad = record.has_nonfinite
            if self._watch.evidence is self._shown:
                self._watch.evidence = None
            self._shown = None
            self.last_record = record
            alerts = self._rules.evaluate(record)
            if self._reporter is not None:
                self._reporter.post(record, alerts)
        except Exception as error:
            self._fault("rules", error)

    def _next_after(self, step: int) -> int:
        return step - step % self._interval + self._interval

    def _fault(self, where: str, error: Exception) -> None:
        """Note a fault of the monitor; training goes on."""
        self._error = f"{where}: {type(error).__name__}: {error}"
        if where not in self._told:
            self._told.add(where)
            log.warning(
                "rank %d: the monitor could not do its part (%s); training goes on",
                self._ranks.rank,
                self._error,
                exc_info=log.isEnabledFor(logging.DEBUG),
            )

    def _give_up(self, error: Exception) -> None:
        """The ranks can no longer talk to each other: stop monitoring rather than stop training."""
        self._fault("collective", error)
        log.error("rank %d: monitoring ends here; training goes on", self._ranks.rank)
        self.close()

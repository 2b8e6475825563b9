"""Watch the loss and the total gradient norm of every step for NaN and Inf.

A sample may miss one NaN; these two numbers cannot. When one of them is not finite, this rank
counts the non-finite elements of all its weights and gradients at once and keeps the counts: by the
next observation the NaN would be everywhere and its origin lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distmon.collect.losses import Arriving, Number, host_value, on_host, one_number
from distmon.collect.ownership import found_inf
from distmon.layout.reported import local_loss, local_norm

SIGNALS = ("sample", "loss", "gradient norm")
"""What showed a non-finite value, by its number in the rank slot."""
MOST_IN_FLIGHT = 1024
"""Signals that are kept while a device is behind; of more, the newest."""
SAMPLE, LOSS, GRAD_NORM = range(len(SIGNALS))


@dataclass
class Evidence:
    """Where this rank held NaN and Inf when one of its signals was first not finite."""

    step: int
    counted_at: int
    """Step in which `counts` were taken: later than `step` where the signal came from a device."""
    signal: int
    """Index into SIGNALS."""
    value: float
    counts: torch.Tensor
    """int64 [parameters, 4], see `nonfinite_counts`."""
    alerted: bool = False
    """Whether the immediate alert has been raised."""

    @property
    def what(self) -> str:
        """The signal, in words."""
        return SIGNALS[self.signal]


class FiniteWatch:
    """Checks signals without waiting for a device, and counts skipped steps.

    A number on the host is checked at once. One on an accelerator is copied to pinned memory and
    checked at the first later step that finds the copy done; the NaN may have spread by then.
    """

    def __init__(
        self,
        count: Callable[[], torch.Tensor],
        has_optimizers: bool = False,
        skips_are_evidence: bool = False,
    ) -> None:
        """`count` returns what `nonfinite_counts` does, of all weights and gradients.

        `has_optimizers`: each step calls `optimizer_stepped`, or the optimizer skipped it.

        `skips_are_evidence`: no loss is scaled, so a step is skipped only when something is wrong.
        """
        self._count = count
        self._skips_are_evidence = skips_are_evidence
        self._knows_steps = has_optimizers
        self._optimizer_stepped = False
        self._in_flight: deque[tuple[int, int, Arriving]] = deque(maxlen=MOST_IN_FLIGHT)
        self._skipped: deque[int] = deque(maxlen=16)
        self._skipped_steps = 0
        self._norm: Number | None = None
        """The newest that was reported, still on its device."""
        self._norm_share = 0.0
        self._norm_reports = self._reports_of_step = 0
        self._losses = 0.0
        self._loss_count = 0
        self.evidence: Evidence | None = None
        """The first since the last record that located one."""
        self.nonfinite_known = False
        """An earlier record has located the NaN that is still there: nothing is checked."""

    def report(
        self, step: int, *, loss: Number | None = None, grad_norm: Number | None = None
    ) -> None:
        """Check the signals of `step`."""
        if self.nonfinite_known:
            return
        if grad_norm is not None:
            self._norm_reports += 1
            norm, share = local_norm(grad_norm)
            self._norm, self._norm_share = one_number(norm), share
            self._watch(GRAD_NORM, self._norm, step)
        if type(loss) is float:
            self._check(LOSS, loss, step, step)
        elif loss is not None:
            self._watch(LOSS, local_loss(loss), step)

    def optimizer_stepped(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Note that `optimizer` has stepped within `step`, so that it is not a skipped step."""
        self._knows_steps = self._optimizer_stepped = True
        if found_inf(optimizer) is not None:
            self._may_be_skipped(step)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known to be wrong and no signal is on its way."""
        return not (self.nonfinite_known or self.evidence is not None or self._in_flight)

    @property
    def expects_optimizer(self) -> bool:
        """Whether a step in which no optimizer steps is a skipped one."""
        return self._knows_steps

    def take_in_idle(self, counted: Mapping[str, Any]) -> None:
        """Take in finite signals of steps that were counted elsewhere."""
        self._losses += counted["loss_sum"]
        self._loss_count += counted["loss_count"]
        if counted["norm"] is not None:
            self._norm, self._norm_share = counted["norm"], 0.0
        if counted["steps"]:
            self._reports_of_step, self._norm_reports = counted["reports_of_step"], 0
            self._optimizer_stepped = False
        self._norm_reports += counted["norm_reports"]
        if counted["stepped"]:
            self._knows_steps = self._optimizer_stepped = True

    def optimizer_captured(self) -> None:
        """Note that a graph replays the optimizer: its hooks no longer run in every step."""
        self._knows_steps = False

    def complete_step(self, step: int, loss: Number | None, grad_norm: Number | None) -> None:
        """Check the signals of `step`, and those that have arrived on the host since.

        Counts a skipped step when no optimizer has stepped since the last call.
        """
        if self._knows_steps and not self._optimizer_stepped:
            self._skipped_steps += 1
            self._may_be_skipped(step)
        self._optimizer_stepped = False
        self.report(step, loss=loss, grad_norm=grad_norm)
        self._reports_of_step, self._norm_reports = self._norm_reports, 0
        while self._in_flight and self._in_flight[0][2].there():
            signal, reported_at, number = self._in_flight.popleft()
            self._check(signal, number.read(), reported_at, step)

    def _may_be_skipped(self, step: int) -> None:
        """Ignore the gradient norm of a step that the optimizer skips, or may skip.

        Whether a GradScaler skips it may be known on the device only.
        """
        if self._skips_are_evidence:
            return
        self._skipped.append(step)
        found = self.evidence
        if found and found.signal == GRAD_NORM and found.step == step:
            self.evidence = None

    def take_for_alert(self) -> Evidence | None:
        """Return the evidence once, for the alert that does not wait for the next record."""
        found = self.evidence
        if self.nonfinite_known or found is None or found.alerted:
            return None
        found.alerted = True
        return found

    def sampled(self, step: int) -> None:
        """Count at once: a sampled weight or gradient of the observed `step` is NaN or Inf."""
        if self.evidence is None and not self.nonfinite_known:
            counts = self._count()
            self.evidence = Evidence(step, step, SAMPLE, math.nan, counts, True)

    def take(self) -> tuple[dict[str, Number], Evidence | None]:
        """Return this rank's slot fields for an observation, and the evidence behind them."""
        norm, self._norm = self._norm, None
        skipped, self._skipped_steps = self._skipped_steps, 0
        loss = self._losses / self._loss_count if self._loss_count else math.nan
        self._losses, self._loss_count = 0.0, 0
        found = self.evidence
        fields: dict[str, Number] = {
            "reported_norm": -1.0 if norm is None else norm,
            "reported_norm_share": self._norm_share,
            "reported_grad_norm": math.nan if norm is None or self._norm_share else norm,
            "norm_reports": float(self._reports_of_step),
            "loss": loss,
            "signal_step": float(found.step if found else 0),
            "signal_counted_at": float(found.counted_at if found else 0),
            "signal_kind": float(found.signal if found else 0),
            "skipped_steps": float(skipped),
            "skips_expected": float(not self._skips_are_evidence),
            "nonfinite_known": float(self.nonfinite_known),
        }
        return fields, found

    def observed(self, sent: Evidence | None, nonfinite: bool) -> None:
        """Forget the evidence that was `sent`: a record has it. `nonfinite`: it located a NaN."""
        if self.evidence is sent:
            self.evidence = None
        self.nonfinite_known = nonfinite
        if nonfinite:
            self._in_flight.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"nonfinite_known": self.nonfinite_known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        known = state["nonfinite_known"]
        if not isinstance(known, bool):
            raise TypeError(f"nonfinite_known is a {type(known).__name__}, not a bool")
        self.nonfinite_known = known

    def _watch(self, signal: int, value: Number, step: int) -> None:
        if on_host(value):
            self._check(signal, host_value(value), step, step)
        else:
            self._in_flight.append((signal, step, Arriving(value)))

    def _check(self, signal: int, value: float, step: int, now: int) -> None:
        if signal == LOSS:
            self._losses += value
            self._loss_count += 1
        if math.isfinite(value) or self.evidence is not None:
            return
        if signal == GRAD_NORM and step in self._skipped:
            return
        self.evidence = Evidence(step, now, signal, value, self._count())

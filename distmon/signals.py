"""Watches the numbers that cover everything, the loss and the total gradient norm, at every step.

A sample cannot promise to see one NaN, but these do. When one of them is not finite, this rank
looks through all its weights and gradients there and then and keeps the result: by the next
observation the NaN would be everywhere and its origin lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distmon.layout import Shard
from distmon.localise import SIGNALS
from distmon.losses import Arriving, host_value, on_host
from distmon.probe.exact import nonfinite_counts

LOSS, GRAD_NORM = SIGNALS.index("loss"), SIGNALS.index("gradient norm")


@dataclass
class Evidence:
    """Where this rank held NaN and Inf when one of its signals was first not finite."""

    step: int
    signal: int
    """Index into SIGNALS."""
    value: float
    counts: torch.Tensor
    """int64 [parameters, 4], see `nonfinite_counts`."""

    told: bool = False
    """Whether the alert of the very step has gone out."""

    @property
    def what(self) -> str:
        return SIGNALS[self.signal]


class SignalWatch:
    """Looks at signals without ever waiting for a device.

    A number on the host is judged at once. One on an accelerator is copied to pinned memory and
    judged at the first later step that finds the copy done; what is found then may already have
    spread by a step or two.
    """

    def __init__(self, shards: Sequence[Shard], skips_are_evidence: bool = False) -> None:
        """`skips_are_evidence`: nothing scales the loss, so no step is skipped without a reason."""
        self._shards = shards
        self._skips_are_evidence = skips_are_evidence
        self._in_flight: deque[tuple[int, int, Arriving]] = deque()
        self._skipped: deque[int] = deque(maxlen=16)
        self._norm: float | None = None
        self.evidence: Evidence | None = None
        """The first of this stretch of trouble; cleared by the monitor when it is told."""

    def watch(self, signal: int, value: float | torch.Tensor, step: int) -> None:
        """Take in one signal of `step`."""
        if on_host(value):
            self._judge(signal, host_value(value), step)
        else:
            self._in_flight.append((signal, step, Arriving(value)))

    def poll(self) -> None:
        """Judge the copies that have arrived."""
        while self._in_flight and self._in_flight[0][2].there():
            signal, step, number = self._in_flight.popleft()
            self._judge(signal, number.read(), step)

    def skipped(self, step: int) -> None:
        """The optimizer left this step out, as a GradScaler does when gradients overflow.

        Its gradient norm is no evidence then, whether it has arrived already or not.
        """
        if self._skips_are_evidence:
            return
        self._skipped.append(step)
        found = self.evidence
        if found and found.signal == GRAD_NORM and found.step == step:
            self.evidence = None

    def take_norm(self) -> float | None:
        """The newest total gradient norm that has arrived since this was last called."""
        norm, self._norm = self._norm, None
        return norm

    def rest(self) -> None:
        """Forget what is on its way: it belongs to trouble that is known."""
        self._in_flight.clear()

    def _judge(self, signal: int, value: float, step: int) -> None:
        if signal == GRAD_NORM:
            self._norm = value
        if math.isfinite(value) or self.evidence is not None:
            return
        if signal == GRAD_NORM and step in self._skipped:
            return
        self.evidence = Evidence(step, signal, value, nonfinite_counts(self._shards))

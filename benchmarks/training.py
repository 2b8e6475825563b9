"""A training step that contenders watch in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from distmon_benchmarks.contenders import Session
from distmon_benchmarks.results import Case
from distmon_benchmarks.workloads import DTYPES, Dtype, Workload

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Turn:
    """How long one training step took, in seconds."""

    whole: float
    """From zeroed gradients to the end of the contender's part."""
    calls: float
    """In the contender's calls before and after the optimizer's step."""
    hooks: float
    """In its hooks, where it knows that."""


class Training:
    """A model, its optimizer and what a step is."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[], torch.Tensor],
        device: torch.device,
        meet: Callable[[], object] = lambda: None,
    ) -> None:
        """`meet`: ranks wait for each other, so that nobody's time has another's delay in it."""
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._device = device
        self._meet = meet

    @classmethod
    def begin(
        cls, workload: Workload, dtype: Dtype, device: torch.device, timed: bool = True
    ) -> Training:
        """Build the model; always the same one. Where nothing is `timed`, batches are small."""
        torch.manual_seed(0)
        model = workload.build().to(device, DTYPES[dtype])
        # The fastest that torch has, so that the share of the step is not made small by it.
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        loss = workload.loss if timed else workload.small_loss or workload.loss
        return cls(model, optimizer, lambda: loss(model, device), device)

    def case(self, workload: Workload, dtype: Dtype) -> Case:
        """How its results are labelled."""
        sizes = [p.numel() for p in self.model.parameters()]
        return Case(workload.name, dtype, "none", 1, len(sizes), sum(sizes))

    def turn(self, session: Session) -> Turn:
        """One step that `session` watches."""
        self.optimizer.zero_grad()
        session.wake()
        begin = self._start()
        loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        before = self._start()
        session.before_step()
        calls = self._end() - before
        self.optimizer.step()
        after = self._start()
        session.after_step(loss.detach())
        end = self._end()
        session.sleep()
        return Turn(end - begin, calls + end - after, session.hook_seconds())

    def _start(self) -> float:
        """The time when everything that came before is done, on all ranks."""
        self._end()
        self._meet()
        return time.perf_counter()

    def _end(self) -> float:
        """The time when everything that was started is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

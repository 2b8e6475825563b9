"""A training step that contenders observe in turn, and the workloads that it can have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn

from distmon.bench.contender import Session
from distmon.bench.results import Case

Dtype = Literal["fp32", "bf16"]
DTYPES: Final[dict[Dtype, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE: Final = 1e-4
COPIES: Final = 7
"""Of the weights, that have to fit into memory: weights, gradients, two of AdamW, the clone of a
contender and that of the truth check, and temporaries."""


@dataclass(frozen=True)
class Workload:
    """A model and its training step. Picklable: memory is measured in another process."""

    name: str
    conditions: str
    """The model and the batch, in words."""
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.device], torch.Tensor]
    """A forward pass on a new batch."""
    small_loss: Callable[[nn.Module, torch.device], torch.Tensor] | None = None
    """The same on a smaller batch, for where nothing is timed."""
    elements: int = 0
    """Approximate number of weights; a model that does not fit is not built. 0: it fits."""
    growth: bool = False
    """Shows how costs grow: only contenders with `in_growth` take part."""

    def does_not_fit(self, dtype: Dtype, processes: int = 1) -> str | None:
        """Return why memory is not enough; None when it is, or when that is unknown."""
        available = available_bytes()
        needed = self.elements * DTYPES[dtype].itemsize * COPIES * processes
        if available is None or needed <= available:
            return None
        return f"needs about {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are free"


def available_bytes() -> int | None:
    """Return free memory, of the accelerator if there is one; None when it is unknown."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":") for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one training step."""

    whole: float
    """From zeroed gradients to the end of the contender's part."""
    calls: float
    """In the contender's calls before and after the optimizer step."""
    hooks: float
    """In its hooks, where they are timed."""


class Training:
    """A model, its optimizer and its step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[], torch.Tensor],
        device: torch.device,
        barrier: Callable[[], object] = lambda: None,
    ) -> None:
        """`barrier`: ranks wait for each other, so that no rank times another one's delay."""
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self._device = device
        self._barrier = barrier

    @classmethod
    def begin(
        cls, workload: Workload, dtype: Dtype, device: torch.device, timed: bool = True
    ) -> Training:
        """Build the model, from the same seed at every call. Not `timed`: batches are small."""
        torch.manual_seed(0)
        model = workload.build().to(device, DTYPES[dtype])
        # The fastest optimizer in torch, so that a slow one does not make the monitor look cheap.
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        loss = workload.loss if timed else workload.small_loss or workload.loss
        return cls(model, optimizer, lambda: loss(model, device), device)

    def case(self, workload: Workload, dtype: Dtype) -> Case:
        """Return the label of its results."""
        sizes = [p.numel() for p in self.model.parameters()]
        conditions = f"{workload.conditions}, fused AdamW"
        return Case(workload.name, dtype, "none", 1, len(sizes), sum(sizes), conditions)

    def step(self, session: Session) -> StepTimes:
        """Train one step, observed by `session`."""
        self.optimizer.zero_grad()
        session.enable()
        begin = self._start()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        detached = loss.detach()
        # Nothing of the benchmark's own between the clock and the calls: it would be as cold.
        clock = self._end if self._device.type == "cuda" else time.perf_counter
        self._start()
        before = clock()
        session.before_step()
        calls = clock() - before
        self.optimizer.step()
        self._start()
        after = clock()
        session.after_step(detached)
        end = clock()
        session.disable()
        return StepTimes(end - begin, calls + end - after, session.hook_seconds())

    def _start(self) -> float:
        """Return the time when everything before is done, on all ranks."""
        self._end()
        self._barrier()
        return time.perf_counter()

    def _end(self) -> float:
        """Return the time when everything that was launched is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

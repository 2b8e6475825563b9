"""Trains a model and collects what monitors report about it, beside the truth.

All modes observe the same steps of the same model, each with a monitor of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import nn

import distmon
from distmon.errors import ConfigError

from .batches import Batch
from .families import Family
from .readings import TOTAL, Reading
from .step_truth import StepTruth, TruthHooks
from .tensor_kinds import kind_of

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE: Final = 1e-3
MICRO_BATCH: Final = 1024
"""Tokens in one backward pass: the logits of 4096 tokens over a large vocabulary fill gigabytes."""
NO_STRETCHING_S: Final = 1e9
"""`budget_after_s` beyond the run, so that the budget does not change the interval."""
WARMUP_CALLS: Final = 2
"""Calls of `Monitor.step` after which it knows the stride of the step numbers."""


class Diverged(Exception):
    """The training has no finite truth to compare with."""


class Training:
    """A model in training, which can go back to where it was."""

    def __init__(self, family: Family, dtype: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.family = family
        self.dtype = dtype
        self._dtype = DTYPES[dtype]
        model, self._loss = family.build()
        self.model: nn.Module = model.to(self._dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, tokens: int) -> float:
        """Train on a new batch; return its loss."""
        self.optimizer.zero_grad()
        batch = self.family.batch(tokens, self._generator)
        parts = _split(batch, max(tokens // MICRO_BATCH, 1))
        total = 0.0
        for part in parts:
            inputs = (t.to(self._dtype) if t.is_floating_point() else t for t in part)
            loss = self._loss(*inputs) / len(parts)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def state(self) -> dict[str, Any]:
        """Return a copy of everything that training changes."""
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def _split(batch: Batch, parts: int) -> list[Batch]:
    return list(zip(*(tensor.chunk(parts) for tensor in batch), strict=True))


class Observers:
    """One monitor per mode on the same training, new ones at every step.

    A monitor's sample is fixed. With another sample at every step the observations are independent,
    also those of weights, which hardly change: a share of covered truths needs many samples.
    """

    def __init__(
        self, training: Training, modes: Sequence[str], interval: int, sample_seeds: Iterator[int]
    ) -> None:
        """`interval` is what the monitors are configured with; they still observe every step."""
        self._training = training
        self._modes = modes
        self._interval = interval
        self._sample_seeds = sample_seeds
        self._shapes = {name: p.shape for name, p in training.model.named_parameters()}

    def observe(self, stage: str, batch: int, step: int) -> Iterator[Reading]:
        """Train for one step on so many tokens and yield its readings."""
        place = (self._training.family.name, self._training.dtype, batch, stage)
        seed = next(self._sample_seeds)
        with ExitStack() as stack:
            hooks = stack.enter_context(TruthHooks(self._training.model, self._training.optimizer))
            monitors = {}
            for mode in self._modes:
                folder = Path(stack.enter_context(TemporaryDirectory()))
                monitors[mode] = stack.enter_context(self._attach(mode, seed, folder))
            loss = self._training.step(batch)
            truth = hooks.last
            if not math.isfinite(loss) or not math.isfinite(truth.total_grad_norm):
                raise Diverged(f"{place}: the loss is {loss} at step {step}")
            for mode, monitor in monitors.items():
                record = self._record(monitor, loss)
                yield from self._readings((*place, mode, step), record, truth)

    def _attach(self, mode: str, seed: int, folder: Path) -> Any:
        """Attach a monitor that observes the next step.

        Its step numbers are multiples of its interval, on which the mode `auto` depends: so it need
        not wait for that many steps.
        """
        monitor = distmon.attach(
            self._training.model,
            self._training.optimizer,
            hooks=False,  # with its own hooks it would close the other monitors of the model
            interval=self._interval,
            sample_size=sample_size(mode),
            seed=seed,
            budget_after_s=NO_STRETCHING_S,
            sinks=(),
            writer="thread",  # a new process for every monitor would take most of the time
            run_dir=folder / "run",
        )
        monitor.install_hooks()
        for call in range(1, WARMUP_CALLS + 1):
            monitor.step(step=call * self._interval)
        return monitor

    def _record(self, monitor: Any, loss: float) -> Any:
        """Complete the step and return the record of its observation."""
        number = (WARMUP_CALLS + 1) * self._interval
        monitor.step(loss=loss, step=number)
        record = monitor.last_record
        if record is None or record.step != number:
            raise RuntimeError(f"the monitor did not observe step {number}")
        return record

    def _readings(
        self, place: tuple[str, str, int, str, str, int], record: Any, truth: StepTruth
    ) -> Iterator[Reading]:
        """Yield what a record says beside the truth; `place` is the first fields of a reading."""
        names, columns = record.params.names, record.params.columns
        if set(names) != set(self._shapes):
            missing = set(self._shapes) ^ set(names)
            raise RuntimeError(f"{place}: record and model differ in {sorted(missing)}")
        yield Reading(
            *place,
            TOTAL,
            TOTAL,
            sum(shape.numel() for shape in self._shapes.values()),
            "grad_norm",
            truth.total_grad_norm,
            float(record.metrics.get("monitor/grad_norm", math.nan)),
            float(record.metrics.get("monitor/grad_norm_stderr", math.nan)),
        )
        for quantity, norms in truth.norms.items():
            estimates, errors = columns[quantity], columns[f"{quantity}_stderr"]
            for row, name in enumerate(names):
                shape = self._shapes[name]
                numbers = (norms[name], float(estimates[row]), float(errors[row]))
                kind = kind_of(name, shape)
                yield Reading(*place, name, kind, shape.numel(), quantity, *numbers)


def sample_size(mode: str) -> int | str:
    """Return the configuration value that a mode stands for."""
    return int(mode) if mode.isdigit() else mode


def unsupported_modes(modes: Sequence[str]) -> list[str]:
    """Return the modes that the configuration of this version refuses."""
    refused = []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mode in modes:
        try:
            with TemporaryDirectory() as folder:
                distmon.attach(
                    model, optimizer, sample_size=sample_size(mode), sinks=(), run_dir=folder
                ).close()
        except ConfigError:
            refused.append(mode)
    return refused

"""distmon itself, with everything that is enabled by default."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import distmon
from distmon.bench.contender import Answer, Contender, Norms, Observed, Session
from distmon.bench.contenders.hook_clock import HookClock
from distmon.runtime.decisions import PATIENCE_S

NEVER = 10_000
"""An interval that no benchmark reaches the end of; a longer one needs more room for losses."""


class MonitorSession(Session):
    """A monitor that is called by hand, so that its calls can be timed."""

    def __init__(self, monitor: distmon.Monitor, model: nn.Module, observes: bool) -> None:
        self.monitor = monitor
        self._observes = observes
        self._gain = monitor.cycle.observer.gain
        self._signals = monitor.telemetry.signals
        modules = {name.removeprefix("module."): each for name, each in model.named_modules()}
        self._clock = HookClock([modules[n] for n in self._gain.blocks.names if n in modules])
        self._compiled_seconds = self._gain.compiled_seconds
        # Off an accelerator the hooks come off in steps that are not observed.
        self._has_hooks = observes or next(model.parameters()).device.type != "cpu"
        self.bind()
        self.disable()

    def bind(self) -> None:
        """Call the methods that the monitor has now as optimizers and trainers do: directly."""
        self.before_step = self.monitor.before_step  # type: ignore[method-assign]
        self._after, self._step = self.monitor.after_step, self.monitor.step

    def enable(self) -> None:
        if self._has_hooks:
            with self._clock.around():
                self._gain.install()
        self._gain.arm(wanted=self._observes, first=False)
        # Looking at the schedule of the other one would end its idle lane.
        if self._signals is not None and self._observes:
            schedule = self.monitor.schedule
            self._signals.step_begins(schedule.coming, schedule.next_observation)

    def after_step(self, loss: torch.Tensor) -> None:
        self._after()
        self._step(loss=loss)

    def disable(self) -> None:
        self._gain.remove()
        self._clock.remove()
        if self._signals is not None:
            self._signals.close()

    def settle(self) -> None:
        self.monitor.cycle.settle(PATIENCE_S)

    def hook_seconds(self) -> float:
        # Compiled hooks run between those of the clock, which does not see them.
        before, self._compiled_seconds = self._compiled_seconds, self._gain.compiled_seconds
        return self._clock.seconds + self._compiled_seconds - before

    def detach(self) -> None:
        self.monitor.close()


class DistmonSession(MonitorSession):
    """A monitor that observes every step."""

    def __init__(
        self, attach: Callable[[int, Path], distmon.Monitor], model: nn.Module, folder: Path
    ) -> None:
        super().__init__(attach(1, folder / "run"), model, observes=True)
        self._attach = attach
        self._model = model
        self._folder = folder
        self._unobserved: MonitorSession | None = None

    def unobserved(self) -> MonitorSession:
        if self._unobserved is None:
            monitor = self._attach(NEVER, self._folder / "unobserved")
            self._unobserved = MonitorSession(monitor, self._model, observes=False)
        return self._unobserved

    def detach(self) -> None:
        super().detach()
        if self._unobserved is not None:
            self._unobserved.detach()

    def answer(self) -> Answer:
        record = self.monitor.last_record
        assert record is not None, "the monitor has no record"
        columns = record.params.columns
        found = {}
        for i, name in enumerate(record.params.names):
            values: dict[str, Any] = {}
            for what in ("weight", "grad", "update"):
                norm = float(columns[f"{what}_norm"][i])
                if norm == norm:  # NaN where there was no gradient
                    values[what] = norm
                    values[f"{what}_error"] = float(columns[f"{what}_norm_stderr"][i])
            found[name] = Norms(**values)
        return found

    def tags(self) -> int | None:
        records = self._folder / "run" / "records.jsonl"
        if not records.exists():
            return None  # only rank 0 writes
        return len(json.loads(records.read_text().splitlines()[-1])["metrics"])


def _begin(observed: Observed, **settings: Any) -> DistmonSession:
    def attach(interval: int, run_dir: Path) -> distmon.Monitor:
        monitor = distmon.attach(
            observed.model,
            observed.optimizer,
            hooks=False,
            run_dir=run_dir,
            interval=interval,
            first_observation=interval,
            sinks=["jsonl", "arrow"],
            budget=None,  # every step is observed, whatever it costs
            **settings,
        )
        assert isinstance(monitor, distmon.Monitor), "the monitor is disabled"
        return monitor

    return DistmonSession(attach, observed.model, observed.folder)


SAMPLED: Final = Contender(
    name="distmon sampled",
    description="distmon with sample_size=sampled: a sample of gradients, weights and updates",
    timing="directly",
    begin=partial(_begin, sample_size="sampled"),
    finds=("weight", "grad", "update"),
)
AUTO: Final = Contender(
    name="distmon auto",
    description="distmon as it is by default from an interval of 100 on: all gradients, sampled "
    "weights and updates",
    timing="directly",
    begin=partial(_begin, sample_size="auto"),
    finds=("weight", "grad", "update"),
)
EXACT: Final = Contender(
    name="distmon exact",
    description="distmon with sample_size=exact: all weights and gradients, sampled updates",
    timing="directly",
    begin=partial(_begin, sample_size="exact"),
    finds=("weight", "grad", "update"),
)

"""distmon itself, with everything that is on by default."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

import distmon
from distmon.flow.block_hooks import BlockHooks, Ear
from distmon_benchmarks.contenders.contender import Answer, Contender, Norms, Session, Watched

NEVER = 10_000
"""An interval that no benchmark reaches the end of; a larger one needs room for its losses."""


class MonitorSession(Session):
    """A monitor that is called by hand, so that its calls can be timed."""

    def __init__(self, monitor: distmon.Monitor, observes: bool) -> None:
        self._monitor = monitor
        self._observes = observes
        self._gate = Gate(monitor)
        self._gate.close()

    def wake(self) -> None:
        self._gate.open(armed=self._observes)

    def before_step(self) -> None:
        self._monitor.before_step()

    def after_step(self, loss: torch.Tensor) -> None:
        self._monitor.after_step()
        self._monitor.step(loss=loss)

    def sleep(self) -> None:
        self._gate.close()

    def hook_seconds(self) -> float:
        return self._gate.seconds

    def detach(self) -> None:
        self._monitor.close()


class DistmonSession(MonitorSession):
    """A monitor that looks at every step."""

    def __init__(self, attach: Callable[[int, Path], distmon.Monitor], folder: Path) -> None:
        super().__init__(attach(1, folder / "run"), observes=True)
        self._attach = attach
        self._folder = folder
        self._idle: MonitorSession | None = None

    def off_interval(self) -> MonitorSession:
        if self._idle is None:
            idle = self._attach(NEVER, self._folder / "idle")
            self._idle = MonitorSession(idle, observes=False)
        return self._idle

    def detach(self) -> None:
        super().detach()
        if self._idle is not None:
            self._idle.detach()

    def answer(self) -> Answer:
        record = self._monitor.last_record
        assert record is not None, "the monitor has observed nothing"
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
            return None  # rank 0 writes for all
        return len(json.loads(records.read_text().splitlines()[-1])["metrics"])


class Gate:
    """Takes the monitor's hooks off the blocks in the turns of others, and times them in its own.

    They look at the gradients between the blocks, in the backward pass of an observed step.
    """

    def __init__(self, monitor: distmon.Monitor) -> None:
        self._flow = monitor._observer.flow
        self._timed: list[Any] = []
        self.seconds = 0.0

    def open(self, armed: bool) -> None:
        """Put them on, timed."""
        self.seconds = 0.0
        self._timed = [
            mock.patch.object(owner, name, self._clocked(getattr(owner, name)))
            for owner, name in ((BlockHooks, "_before"), (BlockHooks, "_after"), (Ear, "__call__"))
        ]
        for patch in self._timed:
            patch.start()
        self._flow.install()
        self._flow.arm(wanted=armed, first=False)

    def close(self) -> None:
        """Take them off."""
        self._flow.remove()
        for patch in self._timed:
            patch.stop()
        self._timed = []

    def _clocked(self, function: Callable[..., None]) -> Callable[..., None]:
        def clocked(*args: Any) -> None:
            begin = time.perf_counter()
            function(*args)
            self.seconds += time.perf_counter() - begin

        return clocked


def _begin(watched: Watched, **settings: Any) -> DistmonSession:
    def attach(interval: int, run_dir: Path) -> distmon.Monitor:
        return distmon.attach(
            watched.model,
            watched.optimizer,
            hooks=False,
            run_dir=run_dir,
            interval=interval,
            sinks=["jsonl", "arrow"],
            budget=None,  # every turn is to be observed, whatever it costs
            **settings,
        )

    return DistmonSession(attach, watched.folder)


SAMPLED: Final = Contender(
    name="distmon sampled",
    description="distmon with its defaults: 1024 elements of every parameter",
    timing="directly",
    begin=_begin,
    finds=("weight", "grad", "update"),
)
EXACT: Final = Contender(
    name="distmon exact",
    description="distmon with sample_size=exact: all weights and gradients, sampled updates",
    timing="directly",
    begin=partial(_begin, sample_size="exact"),
    finds=("weight", "grad", "update"),
)

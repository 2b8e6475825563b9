"""What a step that is not observed costs, beside calls that do nothing.

    python -m benchmarks.overhead.idle_step [--workload gpt2] [--rounds 20]

The hooks before and after the optimizer step and `step()`: cold, right after forward and backward
of a real step, and hot, many times in a row. Only the calls are timed, as the optimizer and the
trainer make them; the clock is in both. The hooks in the model are off in such steps.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.overhead.workloads import WORKLOADS
from distmon.bench.contender import Session
from distmon.bench.contenders import SAMPLED
from distmon.bench.contenders.distmon_monitor import DistmonSession
from distmon.bench.training import Training

Call = Callable[..., Any]
HOT = 2000
"""Calls in a row; fewer than the monitor has steps before it observes one."""


class TimedCalls(Session):
    """Two hooks of the optimizer and `step()`, each timed by itself."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, calls: tuple[Call, Call, Call], around: Session
    ) -> None:
        """`around` says what is installed in the step."""
        self._optimizer = optimizer
        self._before, self._after, self._step = calls
        self._around = around
        self.seconds = 0.0

    def enable(self) -> None:
        self._around.enable()
        self.seconds = 0.0

    def disable(self) -> None:
        self._around.disable()

    def before_step(self) -> None:
        call, optimizer = self._before, self._optimizer
        begin = perf_counter()
        call(optimizer, (), {})
        self.seconds += perf_counter() - begin

    def after_step(self, loss: torch.Tensor) -> None:
        call, step, optimizer = self._after, self._step, self._optimizer
        begin = perf_counter()
        call(optimizer, (), {})
        step(loss=loss)
        self.seconds += perf_counter() - begin


def nothing(*_: object, **__: object) -> None:
    """Stand for a hook, and for `step()`."""


def main() -> None:
    """Print both, in microseconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default="gpt2", choices=[w.name for w in WORKLOADS])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    (workload,) = [w for w in WORKLOADS if w.name == options.workload]
    training = Training.begin(workload, "fp32", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        observing = SAMPLED.attach(training.model, training.optimizer, Path(folder))
        assert isinstance(observing, DistmonSession)
        idle = observing.unobserved()
        own = idle.monitor.before_step, idle.monitor.after_step, idle.monitor.step
        sessions = {
            "distmon": TimedCalls(training.optimizer, own, idle),
            "empty": TimedCalls(training.optimizer, (nothing, nothing, nothing), Session()),
        }
        cold: dict[str, list[float]] = {name: [] for name in sessions}
        for number in range(-2, options.rounds):
            for name, session in sessions.items():
                training.step(session)
                if number >= 0:
                    cold[name].append(session.seconds)
        for name, session in sessions.items():
            print(f"{name:8} cold {_spread(cold[name])}  hot {_spread(_hot(session))} us")
        observing.detach()


def _hot(session: TimedCalls) -> list[float]:
    loss, times = torch.ones(()), []
    for _ in range(HOT):
        session.seconds = 0.0
        session.before_step()
        session.after_step(loss)
        times.append(session.seconds)
    return times[HOT // 10 :]


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8)) * 1e6
    return f"{middle:6.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()

"""What a step that is not observed costs, beside calls that do nothing.

    python -m benchmarks.overhead.idle_step [--workload gpt2] [--rounds 20]

The calls before and after the optimizer step and `step()`: cold, right after forward and backward
of a real step, and hot, many times in a row. The hooks in the model are off in such steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.overhead.workloads import WORKLOADS
from distmon.bench.contender import Session
from distmon.bench.contenders import SAMPLED
from distmon.bench.contenders.distmon_monitor import DistmonSession
from distmon.bench.training import Training

HOT = 2000
"""Calls in a row; fewer than the monitor has steps before it observes one."""


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
        sessions: dict[str, Session] = {"distmon": observing.unobserved(), "empty": Session()}
        cold: dict[str, list[float]] = {name: [] for name in sessions}
        for number in range(-2, options.rounds):
            for name, session in sessions.items():
                seconds = training.step(session).calls
                if number >= 0:
                    cold[name].append(seconds)
        for name, session in sessions.items():
            print(f"{name:8} cold {_spread(cold[name])}  hot {_spread(_hot(session))} us")
        observing.detach()


def _hot(session: Session) -> list[float]:
    loss, times = torch.ones(()), []
    for _ in range(HOT):
        begin = time.perf_counter()
        session.before_step()
        session.after_step(loss)
        times.append(time.perf_counter() - begin)
    return times[HOT // 10 :]


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8)) * 1e6
    return f"{middle:6.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()

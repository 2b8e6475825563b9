"""Where the time of an observation goes: the parts of the monitor, timed inside of real steps.

    python -m benchmarks.overhead.where_time_goes [--workload gpt2] [--rounds 8]

Each line is the median over rounds of what a method took in one step, with everything it calls.
After a step of training, code and data are cold, so timing it in a loop would mean little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.overhead.workloads import WORKLOADS
from distmon.bench.contenders import SAMPLED
from distmon.bench.contenders.distmon_monitor import DistmonSession, MonitorSession
from distmon.bench.interleaved import settle
from distmon.bench.training import Training, Workload
from distmon.monitor import Monitor

PARTS: Final[tuple[tuple[str, Callable[[Monitor], Any], str], ...]] = (
    ("before_step", lambda m: m, "before_step"),
    ("  samples of the weights", lambda m: m.cycle.observer.rows, "snapshot"),
    ("after_step", lambda m: m, "after_step"),
    ("  samples of weights and gradients, all columns", lambda m: m.cycle.observer.rows, "measure"),
    ("step", lambda m: m, "step"),
    ("  loss and gradient norm", lambda m: m.finite_watch, "report"),
    ("  rank telemetry", lambda m: m.telemetry, "take"),
    ("  fill the buffers, launch the collectives", lambda m: m.cycle.observer, "start"),
    ("  take in what has arrived", lambda m: m.cycle, "advance"),
    ("  prepare the next step", lambda m: m.cycle, "prepare_step"),
)
"""What is printed, the part of the monitor, and its method; indented lines are part of the line
above."""
HOOKS: Final = "hooks on the blocks, in forward and backward"


def profile(
    workload: Workload, rounds: int, settle: Callable[[], float] = settle
) -> dict[tuple[str, str], list[float]]:
    """Return seconds by round; keys are observed or unobserved, and a part."""
    training = Training.begin(workload, "fp32", torch.device("cpu"))
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        observing = SAMPLED.attach(training.model, training.optimizer, Path(folder))
        assert isinstance(observing, DistmonSession)
        for number in range(-1, rounds):
            for kind, session in (("observed", observing), ("unobserved", observing.unobserved())):
                settle()
                for part, seconds in _one_step(training, session).items():
                    if number >= 0:
                        found[kind, part].append(seconds)
        observing.detach()
    return found


def _one_step(training: Training, session: MonitorSession) -> dict[str, float]:
    spent = {part: 0.0 for part, _, _ in PARTS}
    with _timed(session.monitor, spent):
        session.bind()
        times = training.step(session)
    session.bind()
    return {HOOKS: times.hooks, **spent}


@contextmanager
def _timed(monitor: Monitor, spent: dict[str, float]) -> Iterator[None]:
    def clocked(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **named)
            finally:
                spent[part] += time.perf_counter() - begin

        return call

    with ExitStack() as patches:
        for part, find, name in PARTS:
            owner = find(monitor)
            patch = mock.patch.object(owner, name, clocked(part, getattr(owner, name)))
            patches.enter_context(patch)
        yield


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default="gpt2", choices=[w.name for w in WORKLOADS])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    (workload,) = [w for w in WORKLOADS if w.name == options.workload]
    seconds = profile(workload, options.rounds)
    table = Table("", title=f"{workload.name}: ms in one step, median of {options.rounds}")
    kinds = ("observed", "unobserved")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for part in (HOOKS, *(part for part, _, _ in PARTS)):
        cells = [statistics.median(seconds[kind, part]) * 1e3 for kind in kinds]
        table.add_row(part, *(f"{each:.3f}" if each else "" for each in cells))
    Console().print(table)


if __name__ == "__main__":
    main()

"""Where the time of an observation goes: the monitor's own functions, timed inside of real steps.

    python benchmarks/where_time_goes.py [--workload gpt2] [--rounds 8]

Each line is the median over rounds of everything that a function took in one step, with what it
calls. After a step of training code and data are cold, so a loop without training says little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from distmon.flow import BackwardNorms
from distmon.flow.block_hooks import BlockHooks, Ear
from distmon.judging import Judge
from distmon.monitor import Monitor
from distmon.observer import Observer
from distmon.ownership import Ownership
from distmon.probe.native_probe import NativeProbe
from distmon.reduce import Buffers
from distmon.telemetry.rank_row import RankTelemetry
from distmon_benchmarks.contenders import Session
from distmon_benchmarks.contenders.distmon_monitor import SAMPLED
from distmon_benchmarks.interleaved import settle
from distmon_benchmarks.training import Training
from distmon_benchmarks.workloads import WORKLOADS, Workload

PARTS: Final[tuple[tuple[type, str, str], ...]] = (
    (BlockHooks, "_before", "gradient flow: a block is entered"),
    (BlockHooks, "_after", "gradient flow: a block is left"),
    (Ear, "__call__", "gradient flow: norms in the backward pass"),
    (Monitor, "before_step", "before_step"),
    (NativeProbe, "snapshot", "  samples of the weights"),
    (Monitor, "after_step", "after_step"),
    (NativeProbe, "measure", "  samples of weights and gradients, all columns"),
    (Ownership, "columns", "  who owns what, at which lr"),
    (Monitor, "step", "step"),
    (Monitor, "_after_every_step", "  loss and signals"),
    (RankTelemetry, "take", "  telemetry of the rank"),
    (Observer, "start", "  fill the buffers, meet the other ranks"),
    (Buffers, "finish", "  read the reduced numbers"),
    (Judge, "begin", "  hand over to the judging thread"),
    (BackwardNorms, "arm", "  hooks for the next step"),
)
"""Class, function, and what it does; what is indented is a part of the line above."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt2", choices=[w.name for w in WORKLOADS])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    (workload,) = [w for w in WORKLOADS if w.name == options.workload]
    seconds = profile(workload, options.rounds)
    table = Table(title=f"{workload.name}: ms in one step, median of {options.rounds}")
    for name, side in (("", "left"), ("observed", "right"), ("not observed", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for _, name, words in PARTS:
        cells = [statistics.median(seconds[kind, name]) * 1e3 for kind in ("observed", "idle")]
        table.add_row(words, *(f"{each:.3f}" if each else "" for each in cells))
    Console().print(table)


def profile(workload: Workload, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds by round; keys are observed or idle, and the name of a function."""
    training = Training.begin(workload, "fp32", torch.device("cpu"))
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        observing = SAMPLED.attach(training.model, training.optimizer, Path(folder))
        idle = observing.off_interval()
        assert idle is not None
        for number in range(-1, rounds):
            for kind, session in (("observed", observing), ("idle", idle)):
                spent = _one_step(training, session)
                for _, name, _ in PARTS:
                    if number >= 0:
                        found[kind, name].append(spent[name])
        observing.detach()
    return found


def _one_step(training: Training, session: Session) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    settle()
    with _timed(spent):
        training.turn(session)
    return spent


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                spent[name] += time.perf_counter() - begin

        return call

    patches = [
        mock.patch.object(owner, name, clocked(name, getattr(owner, name)))
        for owner, name, _ in PARTS
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


if __name__ == "__main__":
    main()

"""Where the CPU time goes: parts of the monitor in the training process, its threads, the writer.

    python -m benchmarks.overhead.cpu_parts [--interval 10] [--observations 60] [--batch 768]

The 24-tensor model of `wall_time` with all sinks and the writer process. CPU time, not wall time:
other programs disturb it less. Each line is what one method took per observation, without the
listed ones that it calls; reading the clock takes 1 to 2 us of each call.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import distmon
from benchmarks.overhead.wall_time import ALL, Trained

PARTS: Final = {
    "distmon.monitor:Monitor": "before_step after_step step",
    "distmon.runtime.idle_lane:CompiledLane": "settle open",
    "distmon.runtime.observation_cycle:ObservationCycle": "take_in advance prepare_step",
    "distmon.runtime.row_measurement:RowMeasurement": "snapshot measure",
    "distmon.runtime.observer:Observer": "start unpack",
    "distmon.probe.native_probe:NativeProbe": "snapshot measure",
    "distmon.collect.ownership:Ownership": "columns",
    "distmon.collect.telemetry.rank_telemetry:RankTelemetry": "take step_begins",
    "distmon.collect.telemetry.phases:PhaseClock": "take take_in",
    "distmon.collect.telemetry.phase_hooks:PhaseMark": "__call__",
    "distmon.collect.signals.step_signals:StepSignals": "take step_begins",
    "distmon.collect.signals.forward_inputs:ForwardHook": "__call__",
    "distmon.collect.signals.backward_passes:BackwardPasses": "_see _count_pass",
    "distmon.collect.signals.weight_jumps:WeightJumps": "compare",
    "distmon.collect.gradient_gain.block_hooks:BlockEnd": "__call__",
    "distmon.collect.gradient_gain.backward_norms:BackwardNorms": "arm send",
    "distmon.runtime.arrived:Arrived": "observation",
    "distmon.runtime.writer_process:WriterProcess": "submit",
    "distmon.writer.mailbox:Mailbox": "send",
}
"""Classes, and their methods that are listed."""


class Spent:
    """CPU time of the training thread by method, each without what it calls of the others."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[float] = []

    def timed(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method, with a clock around it."""

        def call(*args: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return method(*args, **named)
            begin = time.thread_time()
            self._inner.append(0.0)
            try:
                return method(*args, **named)
            finally:
                passed = time.thread_time() - begin
                self.seconds[label] += passed - self._inner.pop()
                self.calls[label] += 1
                if self._inner:
                    self._inner[-1] += passed

        return call

    @contextmanager
    def around(self) -> Iterator[None]:
        """Time the methods of PARTS within the context, and in what is attached in it."""
        with ExitStack() as patches:
            for path, names in PARTS.items():
                module, _, name = path.partition(":")
                owner = getattr(import_module(module), name)
                for method in names.split():
                    clocked = self.timed(f"{name}.{method}", getattr(owner, method))
                    patches.enter_context(mock.patch.object(owner, method, clocked))
            yield


def _beside(monitor: Any) -> dict[str, float]:
    """Return the CPU seconds of the monitor's threads in this process, and of its writer."""
    own = [each for each in threading.enumerate() if hasattr(each, "cpu_seconds")]
    threads = {f"thread {each.name}": each.cpu_seconds() for each in own}
    return {**threads, "writer process": monitor.cycle.worker.cpu_seconds_elsewhere()}


def profile(interval: int, observations: int, batch: int) -> tuple[Spent, dict[str, float]]:
    """Train; return what methods took, and what ran beside them, after a few observations."""
    spent, warm_up = Spent(), Spent()
    trained = Trained("small", batch)
    with tempfile.TemporaryDirectory() as folder, warm_up.around():
        monitor = trained.monitor = distmon.attach(
            trained.model,
            trained.optimizer,
            interval=interval,
            run_dir=f"{folder}/run",
            sinks=ALL,
            budget=None,
        )
        for _ in range(3 * interval + interval // 2):
            trained.step()
        warm_up.seconds, warm_up.calls = spent.seconds, spent.calls
        before = _beside(monitor)
        for _ in range(interval * observations):
            trained.step()
        after = _beside(monitor)
        monitor.close()
    return spent, {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--observations", type=int, default=60)
    parser.add_argument("--batch", type=int, default=768, help="768: steps of about 6 ms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("distmon").setLevel(logging.ERROR)
    spent, threads = profile(options.interval, options.observations, options.batch)
    table = Table("part", "ms per observation", "calls")
    for name, seconds in spent.seconds.most_common():
        each = 1000 * seconds / options.observations
        table.add_row(name, f"{each:.3f}", f"{spent.calls[name] / options.observations:.1f}")
    total = 1000 * sum(spent.seconds.values()) / options.observations
    table.add_row("all of these", f"{total:.3f}", "", end_section=True)
    for name, seconds in threads.items():
        table.add_row(name, f"{1000 * seconds / options.observations:.3f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()

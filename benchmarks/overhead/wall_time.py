"""What training loses: wall time with the monitor against without, in turn in one process.

    python -m benchmarks.overhead.wall_time                 # small models, under 3 minutes
    python -m benchmarks.overhead.wall_time --full          # every sink, longer steps, GPT-2
    python -m benchmarks.overhead.wall_time --cases all-10 --seconds 60

Two equal models are trained in blocks of steps that take turns; one of them has a monitor. What the
monitored blocks take longer is the cost, whatever causes it: code in the hooks, threads that hold
the interpreter lock, the writer process on another core. Intervals are bootstrapped over pairs of
neighboring blocks (95%). Beside it stand the CPU time that
the training process spent more, which other programs disturb less, and what the records say.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import distmon
from benchmarks.overhead.models import Gpt2

ALL: Final = ("console", "jsonl", "arrow", "tensorboard")
STEPS_IN_BLOCK: Final = 50
RESAMPLES: Final = 4000


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    model: str
    step_ms: float
    interval: int
    sinks: tuple[str, ...]
    writer: str = "process"
    seconds: float = 22.0


CASES: Final = (
    Case("all-10", "small", 10, 10, ALL, seconds=30),
    Case("all-100", "small", 10, 100, ALL, seconds=50),
    Case("jsonl-10", "small", 10, 10, ("jsonl",), seconds=15),
    Case("thread-10", "small", 10, 10, ALL, writer="thread", seconds=15),
    Case("medium-20", "medium", 20, 10, ALL, seconds=25),
)
FULL: Final = (
    *CASES,
    Case("fast-10", "small", 5, 10, ALL),
    *(Case(f"{sink}-only", "small", 10, 10, (sink,)) for sink in ALL),
    Case("none-10", "small", 10, 10, ()),
    Case("slow-10", "medium", 200, 10, ALL, seconds=120),
    Case("gpt2-10", "gpt2", 0, 10, ALL, seconds=400),
)


def _layers(count: int, width: int) -> nn.Module:
    """Return layers that keep the size of what passes them.

    With torch's own initialization the gradients of the first of 75 layers are so small that their
    squares are denormal numbers, which some processors compute a hundred times as slowly.
    """
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    for layer in layers:
        nn.init.orthogonal_(layer[0].weight, nn.init.calculate_gain("tanh"))  # type: ignore[arg-type]
    return nn.Sequential(*layers)


def _small() -> nn.Module:
    return _layers(12, 64)


def _medium() -> nn.Module:
    return _layers(75, 256)


class Trained:
    """A model, its optimizer and a batch whose step takes about as long as wanted."""

    def __init__(self, kind: str, batch: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module
        if kind == "gpt2":
            self.model = Gpt2()
            self._input = torch.randint(0, 50257, (1, 128))
        else:
            self.model = _small() if kind == "small" else _medium()
            width = next(self.model.parameters()).shape[1]
            self._input = torch.randn(batch, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.monitor: Any = None

    def step(self) -> float:
        """Train one step and return its seconds."""
        begin = time.perf_counter()
        loss = self.model(self._input).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(loss=loss)
        return time.perf_counter() - begin


def _calibrated(kind: str, wanted_ms: float) -> int:
    """Return the batch whose step takes about `wanted_ms`."""
    batch = 16
    for _ in range(12):
        trained = Trained(kind, batch)
        took = 1000 * statistics.median(trained.step() for _ in range(8))
        if kind == "gpt2" or took >= 0.9 * wanted_ms:
            break
        batch = max(batch + 8, round(batch * min(4.0, wanted_ms / took)))
    return batch


@dataclass
class Measured:
    """Step times of both models, by block."""

    case: Case
    plain: list[list[float]] = field(default_factory=list)
    monitored: list[list[float]] = field(default_factory=list)
    plain_cpu: list[float] = field(default_factory=list)
    monitored_cpu: list[float] = field(default_factory=list)
    """CPU seconds of this process by block: what a busy machine leaves comparable."""
    first: list[float] = field(default_factory=list)
    """The first steps with the monitor, its first observation among them."""
    recorded_seconds: float = 0.0
    records: int = 0
    steps_recorded: int = 0

    @property
    def median(self) -> float:
        """Of an unmonitored step."""
        return statistics.median(itertools.chain.from_iterable(self.plain))

    @property
    def per_step(self) -> float:
        """Mean of an unmonitored step."""
        return float(np.mean([np.mean(block) for block in self.plain]))

    def added(self) -> tuple[float, float, float]:
        """Wall time added per observation, and the interval of it."""
        return self._added([*map(sum, self.plain)], [*map(sum, self.monitored)])

    def added_cpu(self) -> tuple[float, float, float]:
        """CPU time of this process added per observation, and the interval of it."""
        return self._added(self.plain_cpu, self.monitored_cpu)

    def _added(self, plain: list[float], monitored: list[float]) -> tuple[float, float, float]:
        steps = len(self.plain[0])
        values = (np.array(monitored) - np.array(plain)) * self.case.interval / steps
        draw = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
        low, high = np.quantile(values[draw].mean(axis=1), (0.025, 0.975))
        return float(values.mean()), float(low), float(high)

    def longest(self) -> tuple[float, float]:
        """The longest monitored step and the longest plain one, in medians."""
        monitored = max(itertools.chain(self.first, *self.monitored))
        plain = max(itertools.chain.from_iterable(self.plain))
        return monitored / self.median, plain / self.median

    @property
    def recorded(self) -> float:
        """Seconds per observation that the records say."""
        return self.recorded_seconds / max(1, self.steps_recorded) * self.case.interval


def measure(case: Case, seconds: float, now: Callable[[], float] = time.perf_counter) -> Measured:
    """Train both models in turn for about `seconds`."""
    batch = _calibrated(case.model, case.step_ms)
    plain, monitored = Trained(case.model, batch), Trained(case.model, batch)
    measured = Measured(case)
    for trained in (plain, monitored):
        for _ in range(10 if case.model != "gpt2" else 1):
            trained.step()
    with tempfile.TemporaryDirectory() as folder:
        monitor = monitored.monitor = distmon.attach(
            monitored.model,
            monitored.optimizer,
            interval=case.interval,
            run_dir=f"{folder}/run",
            sinks=case.sinks,
            writer=case.writer,
            budget=None,
        )
        # A block begins in the middle of an interval, so that what follows its last observation
        # does not fall into the next block.
        measured.first = [monitored.step() for _ in range(case.interval + case.interval // 2)]
        size = max(1, -(-STEPS_IN_BLOCK // case.interval)) * case.interval
        if case.model == "gpt2":
            size = case.interval
        end = now() + seconds
        for turn in itertools.count():
            # plain first, then monitored first: a drift of the machine affects both alike.
            for trained, times, cpu in _order(turn, plain, monitored, measured):
                begin = time.process_time()
                times.append([trained.step() for _ in range(size)])
                cpu.append(time.process_time() - begin)
            if now() > end and len(measured.plain) >= 4:
                break
        monitor.close()
        if "jsonl" in case.sinks:
            _read_own_cost(Path(folder) / "run", measured)
    return measured


def _order(
    turn: int, plain: Trained, monitored: Trained, measured: Measured
) -> Iterator[tuple[Trained, list[list[float]], list[float]]]:
    both = [
        (plain, measured.plain, measured.plain_cpu),
        (monitored, measured.monitored, measured.monitored_cpu),
    ]
    yield from both if turn % 2 == 0 else reversed(both)


def _read_own_cost(folder: Path, measured: Measured) -> None:
    """Add up what the records say, without the first: it holds the first steps."""
    for record in distmon.read_run(folder).records[1:]:
        ranks = record["ranks"]
        if "monitor_seconds" in ranks:
            device = ranks.get("monitor_device_seconds", [0.0])[0] or 0.0
            measured.recorded_seconds += ranks["monitor_seconds"][0] + device
            measured.steps_recorded += len(record["loss_steps"])
            measured.records += 1


def table(results: list[Measured]) -> Table:
    """Return the lines of all cases."""
    columns = ("case", "step", "interval", "added per observation", "share", "CPU time added")
    found = Table(*columns, "records say", "A/B : records", "longest step (plain)")
    for each in results:
        estimate, low, high = each.added()
        whole = each.per_step * each.case.interval
        recorded = each.recorded
        said = f"{1000 * recorded:.2f} ms, {recorded / whole:.3%}" if recorded else ""
        monitored, plain = each.longest()
        cpu, cpu_low, cpu_high = each.added_cpu()
        found.add_row(
            each.case.name,
            f"{1000 * each.median:.1f} ms",
            str(each.case.interval),
            f"{1000 * estimate:.2f} ms ({1000 * low:.2f} to {1000 * high:.2f})",
            f"{estimate / whole:.3%} ({low / whole:.3%} to {high / whole:.3%})",
            f"{1000 * cpu:.2f} ms ({1000 * cpu_low:.2f} to {1000 * cpu_high:.2f})",
            said,
            f"{estimate / recorded:.2f}" if recorded else "",
            f"{monitored:.1f} ({plain:.1f}) medians",
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead.wall_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="all cases, about 20 minutes")
    parser.add_argument("--cases", help="comma-separated names")
    parser.add_argument("--seconds", type=float, help="for each case, instead of its own time")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("distmon").setLevel(logging.ERROR)
    wanted = options.cases.split(",") if options.cases else None
    cases = [*(FULL if options.full or wanted else CASES)]
    if wanted is not None:
        unknown = {*wanted} - {case.name for case in cases}
        if unknown:
            parser.error(f"no case {', '.join(sorted(unknown))}; {[c.name for c in cases]}")
        cases = [case for case in cases if case.name in wanted]
    results = [measure(case, options.seconds or case.seconds) for case in cases]
    console = Console(width=200)
    console.print(f"torch {torch.__version__}, {options.threads} thread(s) of torch")
    console.print(table(results))


if __name__ == "__main__":
    main()

"""What training loses: wall time with the monitor against without, in turn in one process.

    python -m benchmarks.overhead.wall_time                 # small models, under 3 minutes
    python -m benchmarks.overhead.wall_time --full          # every sink, longer steps, GPT-2
    python -m benchmarks.overhead.wall_time --cases all-10 --seconds 60

Two equal models are trained in blocks of steps that take turns; one of them has a monitor, in the
second half the other one: which memory a model got decides on more of its step time than a monitor
takes. What the monitored blocks take longer is the cost, whatever causes it: code in the hooks,
threads that hold the interpreter lock, the writer process on another core. Intervals are
bootstrapped over pairs of neighboring blocks (95%). Beside it stand the part of it that is lost
from the step before an observed one to the second after it, in a narrower interval where these are
rare; the CPU time that the training process spent more, which other programs disturb less; what
the records say; and the longest step near an observation (the first one included), of the other
monitored ones, and of those without the monitor: what happens in all three is the machine's.
With one thread of torch another core is free for the writer process; in the cases with `cores` in
their names training has all of them.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn

import distmon
from benchmarks.overhead.models import Gpt2
from distmon.record.standard_error import student_factor

ALL: Final = ("console", "jsonl", "arrow", "tensorboard")
STEPS_IN_BLOCK: Final = 50
NEAR: Final = slice(-1, 3)
"""Steps in which an observation does its work, from the observed one: it is prepared at the end of
the step before, and arrives in the two after it."""
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
    threads: int = 1
    """Of torch; 0 for as many as there are cores, which is torch's own default."""


CASES: Final = (
    Case("all-10", "small", 10, 10, ALL, seconds=30),
    Case("all-100", "small", 10, 100, ALL, seconds=50),
    Case("cores-10", "small", 10, 10, ALL, seconds=25, threads=0),
    Case("jsonl-10", "small", 10, 10, ("jsonl",), seconds=15),
    Case("thread-10", "small", 10, 10, ALL, writer="thread", seconds=15),
    Case("medium-20", "medium", 20, 10, ALL, seconds=25),
    Case("gpt-100", "gpt", 20, 100, ALL, seconds=50),
)
FULL: Final = (
    *CASES,
    Case("fast-10", "small", 5, 10, ALL),
    Case("cores-100", "small", 10, 100, ALL, seconds=50, threads=0),
    Case("cores-medium-20", "medium", 20, 10, ALL, seconds=60, threads=0),
    *(Case(f"{sink}-only", "small", 10, 10, (sink,)) for sink in ALL),
    Case("none-10", "small", 10, 10, ()),
    Case("slow-10", "medium", 200, 10, ALL, seconds=120),
    Case("gpt2-10", "gpt2", 0, 10, ALL, seconds=400, threads=0),
    Case("gpt2-100", "gpt2", 0, 100, ALL, seconds=900, threads=0),
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
        elif kind == "gpt":
            self.model = Gpt2(layers=4, width=128, heads=4, vocabulary=1000, context=64)
            self._input = torch.randint(0, 1000, (batch, 64))
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
    batch = 2 if kind == "gpt" else 16
    for _ in range(12):
        trained = Trained(kind, batch)
        took = 1000 * statistics.median(trained.step() for _ in range(8))
        if kind == "gpt2" or took >= 0.9 * wanted_ms:
            break
        batch = max(batch + 1, round(batch * min(4.0, wanted_ms / took)))
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
    observed_at: list[list[int]] = field(default_factory=list)
    """The observed steps of each monitored block, that is, their places in it."""
    first: list[float] = field(default_factory=list)
    """The first steps with the monitor, its first observation among them."""
    threads: int = 1
    """Of torch."""
    exchanged_at: int = 0
    """Blocks after which the other model was monitored."""
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

    def added_near(self) -> tuple[float, float, float]:
        """Wall time added per observation by the NEAR steps."""
        blocks = zip(self.plain, self.monitored, self.observed_at, strict=True)
        values = [
            np.mean(
                [
                    np.sum(np.subtract(steps[at + NEAR.start : at + NEAR.stop], np.mean(plain)))
                    for at in places
                ]
            )
            for plain, steps, places in blocks
        ]
        return self._interval_of(np.array(values))

    def _added(self, plain: list[float], monitored: list[float]) -> tuple[float, float, float]:
        values = np.array(monitored) - np.array(plain)
        return self._interval_of(values * self.case.interval / len(self.plain[0]))

    def _interval_of(self, values: NDArray[np.float64]) -> tuple[float, float, float]:
        """Return the mean over pairs of blocks, and its interval; both halves count the same.

        A bootstrap of few values is too narrow: it is widened as Student's t is.
        """
        halves = values[: self.exchanged_at], values[self.exchanged_at :]
        generator = np.random.default_rng(0)
        drawn = [
            half[generator.integers(len(half), size=(RESAMPLES, len(half)))].mean(axis=1)
            for half in halves
        ]
        estimate, fewest = np.mean([half.mean() for half in halves]), min(map(len, halves))
        wider = student_factor(len(values) - 2) * math.sqrt(fewest / (fewest - 1))
        around = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975)) - estimate
        low, high = estimate + wider * around
        return float(estimate), float(low), float(high)

    def longest(self) -> tuple[float, float, float]:
        """The longest step near an observation, of other monitored ones, and of plain ones.

        In medians; the first steps with the monitor are near its first observation.
        """
        near, other = [*self.first], list[float]()
        for steps, places in zip(self.monitored, self.observed_at, strict=True):
            around = {at + i for at in places for i in range(NEAR.start, NEAR.stop)}
            for i, seconds in enumerate(steps):
                (near if i in around else other).append(seconds)
        groups = near, other, itertools.chain.from_iterable(self.plain)
        near_s, other_s, plain_s = (max(group) / self.median for group in groups)
        return near_s, other_s, plain_s

    @property
    def recorded(self) -> float:
        """Seconds per observation that the records say."""
        return self.recorded_seconds / max(1, self.steps_recorded) * self.case.interval


def measure(case: Case, seconds: float, now: Callable[[], float] = time.perf_counter) -> Measured:
    """Train both models in turn for about `seconds`; each is monitored in one half of them."""
    torch.set_num_threads(case.threads or len(os.sched_getaffinity(0)))
    batch = _calibrated(case.model, case.step_ms)
    both = Trained(case.model, batch), Trained(case.model, batch)
    measured = Measured(case, threads=torch.get_num_threads())
    for trained in both:
        for _ in range(10 if case.model != "gpt2" else 1):
            trained.step()
    _measure_half(measured, *both, seconds / 2, now)
    measured.exchanged_at = len(measured.plain)
    _measure_half(measured, *reversed(both), seconds / 2, now)
    return measured


def _measure_half(
    measured: Measured,
    plain: Trained,
    monitored: Trained,
    seconds: float,
    now: Callable[[], float],
) -> None:
    case, before = measured.case, len(measured.plain)
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
        first = case.interval + case.interval // 2
        measured.first += [monitored.step() for _ in range(first)]
        size = max(1, -(-STEPS_IN_BLOCK // case.interval)) * case.interval
        if case.model == "gpt2":
            size = case.interval
        at = monitor.schedule.next_observation - monitor.schedule.coming  # in every block
        end = now() + seconds
        for turn in itertools.count():
            # plain first, then monitored first: a drift of the machine affects both alike.
            for trained, times, cpu in _order(turn, plain, monitored, measured):
                if trained is monitored:
                    measured.observed_at.append([*range(at, size, case.interval)])
                begin = time.process_time()
                times.append([trained.step() for _ in range(size)])
                cpu.append(time.process_time() - begin)
            if now() > end and len(measured.plain) >= before + 2:
                break
        monitor.close()
        monitored.monitor = None
        if "jsonl" in case.sinks:
            _read_own_cost(Path(folder) / "run", measured)


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
    columns = (
        "case",
        "step",
        "interval",
        "added per observation",
        "share",
        "near it",
        "CPU time added",
    )
    found = Table(*columns, "records say", "A/B : records", "longest step")
    for each in results:
        estimate, low, high = each.added()
        whole = each.per_step * each.case.interval
        recorded = each.recorded
        said = f"{1000 * recorded:.2f} ms, {recorded / whole:.3%}" if recorded else ""
        near_it, other, plain = each.longest()
        cpu, near = _interval_text(each.added_cpu()), _interval_text(each.added_near())
        found.add_row(
            f"{each.case.name}{'' if each.case.threads == 1 else f', {each.threads} threads'}",
            f"{1000 * each.median:.1f} ms",
            str(each.case.interval),
            _interval_text((estimate, low, high)),
            f"{estimate / whole:.3%} ({low / whole:.3%} to {high / whole:.3%})",
            near,
            cpu,
            said,
            f"{estimate / recorded:.2f}" if recorded else "",
            f"{near_it:.1f} near, {other:.1f}, {plain:.1f} without",
        )
    return found


def _interval_text(seconds: tuple[float, float, float]) -> str:
    estimate, low, high = (1000 * each for each in seconds)
    return f"{estimate:.2f} ms ({low:.2f} to {high:.2f})"


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
    parser.add_argument("--threads", type=int, help="of torch, instead of each case's own")
    options = parser.parse_args()
    logging.getLogger("distmon").setLevel(logging.ERROR)
    wanted = options.cases.split(",") if options.cases else None
    cases = [*(FULL if options.full or wanted else CASES)]
    if wanted is not None:
        unknown = {*wanted} - {case.name for case in cases}
        if unknown:
            parser.error(f"no case {', '.join(sorted(unknown))}; {[c.name for c in cases]}")
        cases = [case for case in cases if case.name in wanted]
    if options.threads:
        cases = [replace(case, threads=options.threads) for case in cases]
    results = [measure(case, options.seconds or case.seconds) for case in cases]
    console = Console(width=200)
    cores = len(os.sched_getaffinity(0))
    console.print(f"torch {torch.__version__}, {cores} cores; one thread of torch, or as said")
    console.print(table(results))


if __name__ == "__main__":
    main()

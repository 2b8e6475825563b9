"""What each kind of statistics inside the model costs, as a share of training at interval 100.

    python -m benchmarks.inside_cost                 # GPT-2 124M and a model with experts
    python -m benchmarks.inside_cost --quick         # as `make bench` does: half a minute

Both models are trained on one sequence of 128 tokens with one thread. Every step of a contender is
an observed one, so that its cost is not lost in noise; what it takes more than a monitor without
any of them is divided by 100 steps. Contenders take turns. Two answers: the time that the records
state as the monitor's own, which has little noise and decides about the goal; and the CPU time of
whole steps, which has everything and much noise. Idle steps are measured with nothing and with
everything watched, but not by `--quick`. Launches and host waits of an accelerator are counted by
`tests/simulated_cuda`.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

import distmon
from benchmarks.overhead.mixtral import Mixtral
from benchmarks.overhead.models import Gpt2
from distmon.bench import formatting
from distmon.bench.machine import this_machine

INTERVAL: Final = 100
TOKENS: Final = 128
GOAL: Final = 5e-4
"""Largest share of training that all kinds together may take."""
NONE, ALL = "none", "all"
KINDS: Final[Mapping[str, Sequence[str]]] = {
    NONE: (),
    "activations": ("activations",),
    "attention": ("attention",),
    "experts": ("experts",),
    "spectra": ("spectra",),
    ALL: ("activations", "attention", "experts", "spectra"),
}


@dataclass(frozen=True)
class Workload:
    """A language model, and the kinds that are measured on it."""

    name: str
    build: Callable[[], nn.Module]
    vocabulary: int
    contenders: Sequence[str]


WORKLOADS: Final = (
    Workload("gpt2", Gpt2, 50257, (NONE, "activations", "attention", "spectra", ALL)),
    # What GPT-2 has too is not measured again: `make bench` has ten minutes.
    Workload("mixtral", Mixtral, 32000, (NONE, "experts", ALL)),
)


@dataclass(frozen=True)
class Cost:
    """Seconds of one observed step."""

    step: float
    """CPU time of the training thread."""
    own: float
    """What the record states as the monitor's own."""


@dataclass(frozen=True)
class Row:
    """What one kind costs more than a monitor without any; seconds are medians."""

    workload: str
    kind: str
    observation_seconds: float
    share: float
    """Of training at `INTERVAL`."""
    whole_step_seconds: float
    plain_step_seconds: float
    sent_bytes: float


class Trained:
    """A model that is trained on the same tokens in every step."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self.model = workload.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(0, workload.vocabulary, (1, TOKENS))

    def step(self, monitor: distmon.Monitor) -> float:
        """Train one step and return its CPU time."""
        begin = time.thread_time()
        logits = self.model(self._tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        monitor.step(loss=loss)
        return time.thread_time() - begin

    def observed_steps(self, kinds: Sequence[str], count: int) -> tuple[list[Cost], float]:
        """Return the cost of observed steps after one that warms up, and the bytes sent."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            steps, sent = self._steps(kinds, 1, folder, count)
            lines = (folder / "records.jsonl").read_text().splitlines()
        # A record states what was spent up to it since the one before.
        own = [json.loads(line)["ranks"]["monitor_seconds"][0] for line in lines]
        return [Cost(*each) for each in zip(steps, own, strict=True)][1:], sent

    def idle_steps(self, kinds: Sequence[str], count: int) -> list[float]:
        """Return the CPU time of steps between two observations."""
        with tempfile.TemporaryDirectory() as scratch:
            return self._steps(kinds, INTERVAL, Path(scratch) / "run", count)[0][1:]

    def _steps(
        self, kinds: Sequence[str], interval: int, folder: Path, count: int
    ) -> tuple[list[float], float]:
        settings = {"run_dir": folder, "sinks": ["jsonl"], "interval": interval, "budget": None}
        with distmon.attach(self.model, self.optimizer, inside=list(kinds), **settings) as monitor:
            steps = [self.step(monitor) for _ in range(count + 1)]
            return steps, float(monitor.cycle.observer.collective_bytes)


def measure(workload: Workload, trained: Trained, rounds: int, count: int) -> list[Row]:
    """Return a row for each kind; `count` observed steps of each in every round."""
    costs: dict[str, list[Cost]] = {name: [] for name in workload.contenders}
    sent: dict[str, float] = {}
    for _ in range(rounds):
        for name, found in costs.items():
            more, sent[name] = trained.observed_steps(KINDS[name], count)
            found += more
    step, own = (
        {
            name: statistics.median(getattr(each, part) for each in found)
            for name, found in costs.items()
        }
        for part in ("step", "own")
    )
    return [
        Row(
            workload.name,
            name,
            own[name] - own[NONE],
            (own[name] - own[NONE]) / (INTERVAL * step[NONE]),
            step[name] - step[NONE],
            step[NONE],
            sent[name] - sent[NONE],
        )
        for name in workload.contenders
        if name != NONE
    ]


def described(row: Row) -> str:
    """Return a line of the table, with the goal where all kinds are together."""
    outcome = ""
    if row.kind == ALL:
        reached = "reached" if row.share < GOAL else "missed"
        outcome = f"; goal under {formatting.share(GOAL)}: {reached}"
    return (
        f"{row.workload:8} {row.kind:12} {1e3 * row.observation_seconds:7.2f} ms more an "
        f"observation, {row.share:.4%} of training at interval {INTERVAL} (whole step "
        f"{1e3 * row.whole_step_seconds:+.0f} ms of {1e3 * row.plain_step_seconds:.0f}), "
        f"{row.sent_bytes:.0f} bytes more{outcome}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one observed step of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a folder for inside_cost.csv")
    options = parser.parse_args()
    rounds, count = (1, 1) if options.quick else (options.rounds, 3)
    torch.set_num_threads(1)
    print(f"inside the model, on {this_machine()}")
    rows: list[Row] = []
    for workload in WORKLOADS:
        trained = Trained(workload)
        for row in measure(workload, trained, rounds, count):
            rows.append(row)
            print(described(row), flush=True)
        if options.quick:
            continue
        idle: dict[str, list[float]] = {NONE: [], ALL: []}
        for _ in range(rounds):
            for name, seconds in idle.items():
                seconds += trained.idle_steps(KINDS[name], count)
        for name, seconds in idle.items():
            print(
                f"{workload.name:8} idle steps, {name:5} {1e3 * statistics.median(seconds):.1f} ms "
                f"({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"
            )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "inside_cost.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*asdict(rows[0])])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()

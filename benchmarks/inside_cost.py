"""What each kind of statistics inside the model costs, as a share of training at interval 100.

    python -m benchmarks.inside_cost                 # GPT-2 124M, one sequence of 128 tokens
    python -m benchmarks.inside_cost --layers 4 --width 256 --heads 4

Every step of a contender is an observed one, so that its cost is not lost in noise; what it takes
more than a monitor without any of them is divided by 100 steps. Contenders take turns. Two answers:
the CPU time of whole steps, with one thread, which has everything and much noise; and the time that
the records state as the monitor's own, which has little noise. Idle steps are
measured with nothing and with everything watched. Launches and host waits of an accelerator are
counted by `tests/simulated_cuda`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import distmon
from distmon.bench.machine import this_machine
from launch.model import GPT, Shape

INTERVAL = 100
STEPS = 3
"""Observed steps of a contender in a round."""
CONTENDERS: dict[str, Sequence[str]] = {
    "none": (),
    "activations": ("activations",),
    "attention": ("attention",),
    "experts": ("experts",),
    "spectra": ("spectra",),
    "all": ("activations", "attention", "experts", "spectra"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("vocabulary", 50257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shape = Shape(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.tokens,
        vocabulary=options.vocabulary,
    )
    torch.manual_seed(0)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, options.vocabulary, (1, options.tokens))
    torch.set_num_threads(1)
    costs: dict[str, list[Cost]] = {name: [] for name in CONTENDERS}
    sent: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, kinds in CONTENDERS.items():
            with tempfile.TemporaryDirectory() as folder:
                found, sent[name] = _steps(model, optimizer, tokens, kinds, Path(folder) / "run")
                costs[name] += found
    _print(costs, sent)
    idle: dict[str, list[float]] = {"none": [], "all": []}
    for _ in range(options.rounds):
        for name, seconds in idle.items():
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                seconds += _idle_steps(model, optimizer, tokens, CONTENDERS[name], run)
    for name, seconds in idle.items():
        print(
            f"idle steps, {name:5} {1e3 * statistics.median(seconds):.1f} ms "
            f"({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"
        )


@dataclass(frozen=True)
class Cost:
    """Seconds of one observed step."""

    step: float
    """CPU time of the training thread."""
    own: float
    """What the record states as the monitor's own."""


def _steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    kinds: Sequence[str],
    folder: Path,
) -> tuple[list[Cost], float]:
    """Return the cost of the observed steps after one that warms up, and the bytes sent."""
    settings = {"run_dir": folder, "sinks": ["jsonl"], "interval": 1, "budget": None}
    with distmon.attach(model, optimizer, inside=list(kinds), **settings) as monitor:
        steps = [_step(model, optimizer, tokens, monitor) for _ in range(STEPS + 1)]
        sent = monitor.cycle.observer.collective_bytes
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    # A record states what was spent up to it since the one before.
    own = [record["ranks"]["monitor_seconds"][0] for record in records]
    return [Cost(*each) for each in zip(steps, own, strict=True)][1:], sent


def _idle_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    kinds: Sequence[str],
    folder: Path,
) -> list[float]:
    """Return the CPU time of steps between two observations."""
    settings = {"run_dir": folder, "sinks": ["jsonl"], "interval": INTERVAL, "budget": None}
    with distmon.attach(model, optimizer, inside=list(kinds), **settings) as monitor:
        return [_step(model, optimizer, tokens, monitor) for _ in range(STEPS + 1)][1:]


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    monitor: distmon.Monitor,
) -> float:
    """Train one step and return its CPU time."""
    begin = time.thread_time()
    output = model(tokens)
    logits = output[0] if isinstance(output, tuple) else output
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    monitor.step(loss=loss)
    return time.thread_time() - begin


def _print(costs: dict[str, list[Cost]], sent: dict[str, float]) -> None:
    base_step = statistics.median(each.step for each in costs["none"])
    base_own = statistics.median(each.own for each in costs["none"])
    print(json.dumps({"machine": str(this_machine()), "step_seconds": base_step}))
    for name, found in costs.items():
        steps = [each.step - base_step for each in found]
        extra = statistics.median(each.own for each in found) - base_own
        print(
            f"{name:12} records {1e3 * extra:7.2f} ms more an observation, "
            f"{extra / (INTERVAL * base_step):.4%} of training at interval {INTERVAL}; "
            f"whole steps {1e3 * statistics.median(steps):7.1f} ms "
            f"({1e3 * min(steps):.0f} to {1e3 * max(steps):.0f}); {sent[name]:.0f} bytes sent"
        )


if __name__ == "__main__":
    main()

"""What each kind of statistics inside the model costs, as a share of training at interval 100.

    python -m benchmarks.inside_cost                 # GPT-2 124M, one sequence of 128 tokens
    python -m benchmarks.inside_cost --layers 4 --width 256 --vocabulary 1000

Every step of a contender is an observed one, so that its cost is not lost in noise; the extra time
against a monitor without any of them is divided by 100 steps. Contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import distmon
from distmon.bench.machine import this_machine
from launch.model import GPT, Shape

INTERVAL = 100
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
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    sent: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, kinds in CONTENDERS.items():
            with tempfile.TemporaryDirectory() as folder:
                found, sent[name] = _steps(model, optimizer, tokens, kinds, folder)
                seconds[name] += found
    _print(seconds, sent)


def _steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    kinds: Sequence[str],
    folder: str,
) -> tuple[list[float], float]:
    """Return the seconds of two observed steps, after one that warms up, and the bytes sent."""
    found = []
    settings = {"run_dir": folder, "sinks": [], "interval": 1, "budget": None}
    with distmon.attach(model, optimizer, inside=list(kinds), **settings) as monitor:
        for step in range(3):
            begin = time.perf_counter()
            output = model(tokens)
            logits = output[0] if isinstance(output, tuple) else output
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            if step:
                found.append(time.perf_counter() - begin)
        return found, monitor.cycle.observer.collective_bytes


def _print(seconds: dict[str, list[float]], sent: dict[str, float]) -> None:
    base = statistics.median(seconds["none"])
    print(json.dumps({"machine": str(this_machine()), "step_seconds": base}))
    for name, found in seconds.items():
        extra = statistics.median(found) - base
        print(
            f"{name:12} extra {1e3 * extra:8.1f} ms an observation "
            f"({min(found):.3f} to {max(found):.3f} s a step), "
            f"{extra / (INTERVAL * base):.4%} at interval {INTERVAL}, {sent[name]:.0f} bytes sent"
        )


if __name__ == "__main__":
    main()

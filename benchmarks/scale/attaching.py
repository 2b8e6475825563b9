"""How long `distmon.attach` takes, by the number of tensors.

    python -m benchmarks.scale attach [--tensors 100,1000,5000] [--rounds 5]

Matrices of 64 x 64 on one rank, all sinks on. The start of the writer process is part of the time.
The first attach of the process, which imports modules, stands apart.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import nn

import distmon
from benchmarks.overhead.wall_time import ALL

WIDTH = 64


def seconds_to_attach(tensors: int) -> float:
    """Attach to a model of so many tensors, and return how long that took."""
    model = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(tensors)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        monitor = distmon.attach(
            model, optimizer, run_dir=f"{folder}/run", sinks=ALL, console=Console(quiet=True)
        )
        seconds = time.perf_counter() - begin
        monitor.close()
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each number of tensors."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale attach", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tensors", default="100,1000,5000", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    logging.getLogger("distmon").setLevel(logging.ERROR)
    counts = [int(each) for each in options.tensors.split(",")]
    print(f"first attach of the process, {counts[0]} tensors: {seconds_to_attach(counts[0]):.2f} s")
    for count in counts:
        found = sorted(seconds_to_attach(count) for _ in range(options.rounds))
        text = f"median {statistics.median(found):.2f} s, {found[0]:.2f} to {found[-1]:.2f} s"
        print(f"{count:6} tensors: {text} in {options.rounds} rounds", flush=True)

"""`python -m benchmarks.compare_noise`: verdicts of `distmon compare` on runs that differ by seed.

The same small language model is trained once per seed, in the same way. Every pair of runs is
compared; a verdict other than `within noise` is a false one, as is one about speed that comes from
what else the machine did. With `--slower` every second run does more work per step: there a verdict
on `step_seconds` is right.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import distmon
from distmon.report.compare.compared_run import load_runs
from distmon.report.compare.verdicts import common_axis, compare_quantities


def train(seed: int, folder: Path, steps: int, extra: int = 0) -> None:
    """Train on numbers that follow each other; `extra`: layers that change nothing."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(64, 64), body, nn.Linear(64, 64))
    idle = [nn.Linear(256, 256) for _ in range(extra)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    settings = {"interval": 4, "sinks": ["jsonl", "arrow"], "budget": None, "run_dir": folder}
    with distmon.attach(model, optimizer, settings) as monitor:
        for _ in range(steps):
            start, stride = torch.randint(64, (8, 1)), torch.randint(1, 4, (8, 1))
            tokens = (start + stride * torch.arange(25)) % 64
            scores = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())
            loss.backward()
            with torch.no_grad():
                for each in idle:
                    each(torch.ones(64, 256))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss, grad_norm=norm, tokens=tokens.numel())


def verdicts(folders: list[Path]) -> dict[str, Counter[str]]:
    """Return how often each verdict was given on each quantity, over all pairs."""
    runs = load_runs(folders)
    found: dict[str, Counter[str]] = {}
    for a, b in itertools.combinations(runs, 2):
        for each in compare_quantities(a, b, common_axis(a, b, None)):
            found.setdefault(each.quantity.key, Counter())[each.verdict] += 1
    return found


def main() -> None:
    """Train what is not there yet, and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/compare_noise"))
    parser.add_argument("--seeds", default="0-5", help="FIRST-LAST")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--slower", type=int, default=0, help="layers more in every second run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, options.seeds.split("-"))
    folders = []
    for seed in range(first, last + 1):
        extra = options.slower * (seed % 2)
        folders.append(options.out / f"seed{seed}-{extra}")
        if not folders[-1].exists():
            train(seed, folders[-1], options.steps, extra)
    table = Table(title=f"{len(folders)} runs, every pair")
    for heading in ("quantity", "within noise", "called different"):
        table.add_column(heading)
    for key, counts in verdicts(folders).items():
        quiet = counts["within noise"] + counts["equal"] + counts["too few points"]
        called = ", ".join(f"{n} {name}" for name, n in counts.items() if name in CALLED)
        table.add_row(key, str(quiet), called or "0")
    Console(width=100).print(table)


CALLED = ("better", "worse", "higher", "lower")

if __name__ == "__main__":
    main()

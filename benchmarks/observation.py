"""What one observation costs, beside the naive way, in one run on this machine.

    python benchmarks/observation.py [--layers 12 --width 768] [--rounds 15] [--backend auto]

Contenders take turns after each real training step, so that each finds caches as cold as in life
and drift of the machine hits all alike. The naive way clones every weight before the step,
subtracts after it and reads two norms per parameter back with `.item()`. The last row is what a
step costs on which nothing is observed. Ratios count; the times are those of this machine.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import distmon


def build_model(layers: int, width: int) -> nn.Module:
    """A stack of transformer-shaped blocks: the tensors of a GPT without its attention."""
    blocks = []
    for _ in range(layers):
        norm = nn.LayerNorm(width)
        blocks += [norm, nn.Linear(width, 3 * width), nn.Linear(3 * width, width)]
        blocks += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()]
        blocks += [nn.Linear(4 * width, width)]
    return nn.Sequential(nn.Linear(width, width), *blocks)


class Naive:
    """Clone everything, subtract, and read every norm back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[torch.Tensor] = []
        self.found: list[tuple[float, float]] = []

    def before_step(self) -> None:
        self._before = [p.detach().clone() for p in self._model.parameters()]

    def after_step(self) -> None:
        pairs = zip(self._model.parameters(), self._before, strict=True)
        self.found = [((p.detach() - b).norm().item(), p.grad.norm().item()) for p, b in pairs]
        self._before = []


class Clock:
    """Adds up the seconds of what it is told to run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, function: Callable[[], None]) -> None:
        begin = time.perf_counter()
        function()
        self.seconds += time.perf_counter() - begin


def measure(model: nn.Module, rounds: int, folder: Path, backend: str) -> dict[str, list[float]]:
    """Seconds by contender and round."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    width = next(model.parameters()).shape[1]
    settings = {"interval": 1, "sinks": ["jsonl", "arrow"], "hooks": False, "backend": backend}
    settings["budget"] = None  # every round is to be observed, whatever it costs
    sampled = distmon.attach(model, optimizer, run_dir=folder / "sampled", **settings)
    exact = distmon.attach(
        model, optimizer, run_dir=folder / "exact", sample_size="exact", **settings
    )
    idle = distmon.attach(
        model, optimizer, run_dir=folder / "idle", **{**settings, "interval": 10**6}
    )
    naive = Naive(model)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    contenders = {"naive clone": naive, "distmon sampled": sampled, "distmon exact": exact}
    for _ in track(range(rounds), "rounds", transient=True):
        for name, contender in contenders.items():
            optimizer.zero_grad()
            begin = time.perf_counter()
            loss = model(torch.randn(64, width)).square().mean()
            loss.backward()
            clock = Clock()
            clock.run(contender.before_step)
            optimizer.step()
            clock.run(contender.after_step)
            if isinstance(contender, distmon.Monitor):
                clock.run(lambda m=contender, value=loss: m.step(loss=value, tokens=64))
            note("training step", time.perf_counter() - begin - clock.seconds)
            note(name, clock.seconds)
        begin = time.perf_counter()
        torch._foreach_norm([p.grad for p in model.parameters()])
        note("torch._foreach_norm of gradients", time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(100):
            idle.before_step(optimizer)
            idle.after_step(optimizer)
            idle.step(loss=loss, tokens=64)
        note("distmon off the interval", (time.perf_counter() - begin) / 100)
    _check_truth(sampled, naive)
    for monitor in (sampled, exact, idle):
        monitor.close()
    return times


def _check_truth(sampled: distmon.Monitor, naive: Naive) -> None:
    """No speed number for a wrong answer: sampled norms within 6 standard errors of the clone's.

    The two watched neighbouring steps of one model, so gradients of 10% difference are the same.
    """
    record = sampled.last_record
    assert record is not None
    columns = record.params.columns
    for i, (_, grad) in enumerate(naive.found):
        allowed = 6 * columns["grad_norm_stderr"][i] + 0.5 * grad
        assert abs(columns["grad_norm"][i] - grad) <= allowed, record.params.names[i]


def report(times: dict[str, list[float]], model: nn.Module, out: Path) -> None:
    """Print the table and write it as CSV with its context."""
    step, naive = median(times["training step"]), median(times["naive clone"])
    tensors, elements = len([*model.parameters()]), sum(p.numel() for p in model.parameters())
    table = Table(title=f"{tensors} tensors, {elements / 1e6:.0f}M elements, fp32, one process")
    for heading in ("", "p20", "p50", "p80", "naive / this", "share of step at 1", "at 100"):
        table.add_column(heading, justify="right")
    context = {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "distmon": distmon.__version__,
        "commit": _commit(),
        "tensors": tensors,
        "elements": elements,
    }
    rows = []
    for name, values in times.items():
        low, _, _, high = quantiles(values, n=5)
        middle = median(values)
        share = middle / step
        table.add_row(
            name,
            *(f"{1e3 * v:.3f} ms" for v in (low, middle, high)),
            f"{naive / middle:.1f}x",
            "" if name == "training step" else f"{share:.2%}",
            "" if name == "training step" else f"{share / 100:.4%}",
        )
        rows.append({"what": name, "p20_s": low, "p50_s": middle, "p80_s": high, **context})
    Console(width=130).print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {out}")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="auto", help="as in distmon's configuration")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/observation.csv"))
    options = parser.parse_args()
    if min(options.layers, options.width, options.rounds - 1) < 1:
        sys.exit("benchmarks/observation.py: layers and width must be at least 1, rounds 2")
    model = build_model(options.layers, options.width)
    with tempfile.TemporaryDirectory() as folder:
        times = measure(model, options.rounds, Path(folder), options.backend)
    report(times, model, options.out)


if __name__ == "__main__":
    main()

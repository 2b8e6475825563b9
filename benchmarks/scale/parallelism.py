"""What an observation costs under each parallelism, side by side on two gloo ranks.

    python -m benchmarks.scale parallelism                 # 1000 parameters
    python -m benchmarks.scale parallelism --params 100

Every parallelism trains the same model, every step is observed, and rounds take turns, so that a
load on the machine affects all of them. The ratio to DDP is what counts, not the milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distmon

RANKS = 2
ROUNDS = 3
STEPS = 8
LAYER = 32


class Layers(nn.Module):
    """Many small matrices, each of which gets a gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(LAYER, LAYER, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).square().mean() for layer in self.layers)  # type: ignore[return-value]


Step = Callable[[], torch.Tensor]
"""One training step but for the monitor; returns the loss."""


def torch_steps(model: nn.Module) -> tuple[Any, torch.optim.Optimizer, Step]:
    """Return the model, its optimizer and its step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, LAYER)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def engine_steps(model: nn.Module, stage: int) -> tuple[Any, None, Step]:
    """Return a DeepSpeed engine and its step; it calls the monitor itself."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.randn(4, LAYER)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(x)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, None, step


PARALLELISMS: dict[str, Callable[[nn.Module], tuple[Any, Any, Step]]] = {
    "ddp": lambda m: torch_steps(DistributedDataParallel(m)),
    "fsdp": lambda m: torch_steps(fully_shard(m)),
    "fsdp1": lambda m: torch_steps(
        FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device("cpu"))
    ),
    "zero2": lambda m: engine_steps(m, 2),
    "zero3": lambda m: engine_steps(m, 3),
}


def measure(rank: int, params: int, folder: str, names: list[str]) -> None:
    """Measure the monitor's own seconds per observation on one rank; rank 0 writes them."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    if any(name.startswith("zero") for name in names):
        from distmon.integrations.deepspeed import skip_builds

        skip_builds()
    running = {}
    for name in names:
        model, optimizer, step = PARALLELISMS[name](Layers(params))
        monitor = distmon.attach(model, optimizer, interval=1, run_dir=f"{folder}/{name}", sinks=[])
        running[name] = (monitor, step, optimizer is None)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, (monitor, step, is_engine) in running.items():
            for number in range(STEPS):
                loss = step()
                if not is_engine:
                    monitor.step(loss=loss)
                assert monitor.last_record is not None
                if number:  # the first of a round finds cold caches
                    own = monitor.last_record.metrics["performance/monitor_seconds"]
                    seconds[name].append(own)
    if rank == 0:
        lines = [f"{name} {statistics.median(values)}" for name, values in seconds.items()]
        Path(folder, "result").write_text("\n".join(lines))
    dist.barrier()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per parallelism."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale parallelism", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--params", type=int, default=1000)
    parser.add_argument("--only", default=",".join(PARALLELISMS), help="names, with commas")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.params, folder, names), nprocs=RANKS)  # type: ignore[no-untyped-call]
        result = dict(line.split() for line in Path(folder, "result").read_text().splitlines())
    print(
        f"torch {torch.__version__}, {RANKS} gloo ranks, one thread each, {options.params} "
        f"parameters of {LAYER}x{LAYER} fp32, median of {ROUNDS * (STEPS - 1)} observations"
    )
    base = float(result[names[0]])
    for name, value in result.items():
        milliseconds = float(value) * 1e3
        print(f"{name:6} {milliseconds:8.2f} ms  {milliseconds / 1e3 / base:5.2f} x {names[0]}")

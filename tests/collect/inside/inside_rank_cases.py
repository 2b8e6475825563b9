"""What two ranks find inside a model, one case after the other in one pair of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distmon
from benchmarks.alarms.inside_models import VOCABULARY, Transformer
from distmon import Monitor, Record
from distmon.attach import attach_source
from distmon.layout import capture, named_modules
from distmon.runtime.source import Options, Source
from distmon.verify.parallelisms import PARALLELISMS
from distmon.verify.workloads import load_workload

STEPS = 4
WAYS = ("fsdp", "tp-sequence", "pp")


def observed(way: str, folder: Path) -> list[Record]:
    """Train the example model in this way; a record of every step."""
    distributed = PARALLELISMS[way].build(load_workload(None))
    shards = capture(distributed.modules) if distributed.shards is None else distributed.shards()
    source = Source(
        find_shards=lambda _: shards,
        device=torch.device("cpu"),
        optimizers=distributed.optimizers,
        find_modules=lambda: named_modules([*map(_without_engine, distributed.modules)]),
        param_groups=distributed.groups,
        models=distributed.modules,
    )
    settings: dict[str, Any] = {"run_dir": folder / way, "sinks": [], "interval": 1}
    monitor = attach_source(source, Options(overrides={**settings, "inside": "activations"}))
    assert isinstance(monitor, Monitor)
    records = []
    with monitor:
        for step in range(1, STEPS + 1):
            for module in distributed.modules:
                module.zero_grad()
            loss = distributed.backward(step)
            if distributed.step is not None:
                distributed.step()
            else:
                for optimizer in distributed.optimizers:
                    optimizer.step()
            monitor.step(loss=loss)
            assert monitor.last_record is not None
            records.append(monitor.last_record)
    if distributed.close is not None:
        distributed.close()
    return records


def _without_engine(module: nn.Module) -> nn.Module:
    return module.module if type(module).__name__ == "DeepSpeedEngine" else module


class TwoLayers(nn.Module):
    """Half of the hidden units are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 40)
        self.act = nn.ReLU()
        self.down = nn.Linear(40, 8)
        with torch.no_grad():
            self.up.bias[:10] = -100  # on the first rank under tensor parallelism

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.act(self.up(x)))
        return output


def dead_units(rank: int, world: int, folder: Path, parallel: str) -> dict[str, float]:
    """Return the row of the activation function."""
    torch.manual_seed(0)
    model: nn.Module = TwoLayers()
    x = torch.randn(64, 8)
    if parallel == "tp":
        mesh = init_device_mesh("cpu", (world,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    elif parallel == "ddp":
        # One unit is active for the examples of one rank only.
        x[:, 0] = 0
        x[40, 0] = 1.0
        with torch.no_grad():
            model.up.weight[20], model.up.bias[20] = 0, -0.5
            model.up.weight[20, 0] = 1
        x = x.chunk(world)[rank]
        model = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings: dict[str, Any] = {"run_dir": folder / f"dead-{parallel}", "sinks": []}
    with distmon.attach(model, optimizer, interval=1, inside="activations", **settings) as monitor:
        model(x).square().mean().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
        assert record is not None
        assert record.faults == ()
        return record.inside["activations"].row("act")


def experts(rank: int, world: int, folder: Path, parallel: str) -> dict[str, dict[str, float]]:
    """Return the rows of the routers of a model that ranks train on parts of a batch."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(moe=True, depth=2)
    tokens = torch.randint(0, VOCABULARY, (8, 16)).chunk(world)[rank]
    if parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"run_dir": folder / f"experts-{parallel}", "sinks": []}
    with distmon.attach(model, optimizer, interval=1, inside="experts", **settings) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
            monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.faults == ()
    table = record.inside["experts"]
    return {name: table.row(name) for name in table.names}


def cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Everything that takes two ranks."""
    found: dict[str, Any] = {way: observed(way, folder) for way in WAYS}
    for parallel in ("ddp", "fsdp"):
        found[f"experts-{parallel}"] = experts(rank, world, folder, parallel)
    for parallel in ("tp", "ddp"):
        found[f"dead-{parallel}"] = dead_units(rank, world, folder, parallel)
    return found

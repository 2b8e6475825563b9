"""What two ranks do with blocks, one case after the other in one pair of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gain_models import Net, data, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import distmon
from distmon import Monitor, Record
from distmon.errors import DistmonError
from distmon.layout import local_part
from distmon.verify.parallelisms import PARALLELISMS
from distmon.verify.workloads import load_workload

STEPS = 2
WAYS = ("ddp", "ddp-accumulate", "fsdp1-full-flat", "fsdp", "fsdp-no-reshard", "tp", "tp-sequence")
PIPELINE = "pp"


def observed(way: str, folder: Path) -> list[Record]:
    """Train the example model in this way; a record of every step."""
    distributed = PARALLELISMS[way].build(load_workload(None))
    records = []
    settings: dict[str, Any] = {"run_dir": folder / way, "sinks": [], "interval": 1}
    with distmon.attach(distributed.modules, distributed.optimizers, **settings) as monitor:
        for step in range(1, STEPS + 1):
            for module in distributed.modules:
                module.zero_grad()
            loss = distributed.backward(step)
            for optimizer in distributed.optimizers:
                optimizer.step()
            monitor.step(loss=loss)
            assert monitor.last_record is not None
            records.append(monitor.last_record)
    if distributed.close is not None:
        distributed.close()
    return records


def cases(rank: int, _world: int, folder: Path) -> dict[str, Any]:
    """Everything that takes two ranks."""
    found: dict[str, Any] = {way: observed(way, folder) for way in (*WAYS, PIPELINE)}
    found["parts"] = _parts_of_activations()
    found["glob"] = _glob_that_matches_nothing(folder)
    found["fault"] = _fault_on_one_rank(rank, folder)
    found["error"] = _error_on_one_rank(rank, folder)
    return found


def _parts_of_activations() -> dict[str, tuple[int, int] | None]:
    """Elements that this rank reads of a gradient of 4 x 2, and ranks that read the same ones."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, placement in {"cut": Shard(0), "whole": Replicate(), "addends": Partial()}.items():
        local = torch.ones(2 if name == "cut" else 4, 2)
        part = local_part(DTensor.from_local(local, mesh, [placement]))
        found[name] = None if part is None else (part[0].numel(), part[1])
    return found


def _glob_that_matches_nothing(folder: Path) -> str:
    model = Net(2)
    try:
        distmon.attach(
            model,
            torch.optim.SGD(model.parameters()),
            run_dir=folder,
            sinks=[],
            flow={"blocks": "layers.*"},
        )
    except DistmonError as error:
        return str(error)
    return ""


def _attached(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, Monitor]:
    model = Net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = distmon.attach(model, optimizer, run_dir=folder, sinks=[], interval=1)
    return model, optimizer, monitor


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor) -> Record:
    loss_of(model, data(1)).backward()
    optimizer.step()
    monitor.step()
    assert monitor.last_record is not None
    return monitor.last_record


def _fault_on_one_rank(rank: int, folder: Path) -> list[Record]:
    """A hook of rank 1 fails once."""
    model, optimizer, monitor = _attached(folder / "fault")
    with monitor:
        if rank == 1:
            monitor.cycle.observer.gain.switch.fault = RuntimeError("made up")
        return [_step(model, optimizer, monitor) for _ in range(2)]


def _error_on_one_rank(rank: int, folder: Path) -> list[Record]:
    """Rank 1 cannot measure at all in the first step."""
    model, optimizer, monitor = _attached(folder / "error")
    with monitor:
        if rank == 1:
            monitor.faults.report("measure", RuntimeError("made up"), spoils_observation=True)
        return [_step(model, optimizer, monitor) for _ in range(2)]

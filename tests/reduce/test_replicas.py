"""Whatever ranks hold in common is compared, however the rest of the model is spread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import run_ranks
from small_runs import quiet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distmon


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.norm(x + self.down(self.up(x).relu()))


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _replicated(model: Net) -> nn.Module:
    return DistributedDataParallel(model)


def _hybrid(model: Net) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))


def _tensor_parallel(model: Net) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (4,)), TENSOR_PARALLEL)


def _both(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], TENSOR_PARALLEL), mesh=mesh["dp"])


def _drift(rank: int, _: int, folder: str) -> dict[str, Any]:
    cases: tuple[tuple[str, Callable[[Net], nn.Module], str, int], ...] = (
        ("replicated", _replicated, "up.weight", 2),
        ("hybrid", _hybrid, "up.weight", 3),
        ("tensor parallel", _tensor_parallel, "norm.weight", 1),
        ("both", _both, "norm.bias", 3),
        ("no rank", _both, "", 0),
    )
    found = {}
    for name, wrap, drifting, where in cases:
        model = Net()
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, foreach=False)
        with distmon.attach(wrapped, optimizer, **quiet(Path(folder) / name)) as monitor:
            for step in range(1, 3):
                optimizer.zero_grad()
                # The same data everywhere: how gradients are averaged plays no part here.
                wrapped(torch.ones(2, 8)).square().mean().backward()
                # After the backward, through which it would spread.
                if step == 2 and rank == where and drifting:
                    weight = model.get_parameter(drifting).data
                    getattr(weight, "_local_tensor", weight).add_(1e-3)
                optimizer.step()
                monitor.step()
            assert monitor.last_record is not None
            found[name] = monitor.last_record.desync
    return found


def test_the_drifting_parameter_and_rank_are_named(tmp_path: Path) -> None:
    for found in run_ranks(_drift, 4, str(tmp_path)):
        assert found["no rank"] is None
        assert (found["replicated"].ranks, found["replicated"].tie) == ((2,), False)
        # Two replicas have no majority; the lower rank is the reference.
        assert (found["hybrid"].ranks, found["hybrid"].reference) == ((3,), 1)
        assert (found["tensor parallel"].ranks, found["tensor parallel"].tie) == ((1,), False)
        assert found["both"].ranks == (3,)
        assert found["both"].reference == 2
        assert found["replicated"].params == found["hybrid"].params == ("up.weight",)
        assert found["tensor parallel"].params == ("norm.weight",)
        assert found["both"].params == ("norm.bias",)

"""Collectives and sharded models on the simulated device; two ranks, a device each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from simulated_cuda.device import peek, set_order, take_waits


def here() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def made() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.randn(64, 16), torch.randint(0, 4, (64,))


def losses_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def compare(wrap: Any) -> None:
    """Train on half of the batch per rank, in two orders, and compare with one CPU process."""
    model, inputs, labels = made()
    expected = losses_of(model, inputs, labels)
    half = slice(dist.get_rank() * 32, dist.get_rank() * 32 + 32)
    for seed in (0, 3):
        set_order(seed)
        model = wrap(made()[0].to(here()))
        losses = losses_of(model, inputs[half].to(here()), labels[half].to(here()))
        dist.all_reduce(losses)
        assert (losses.cpu() / 2 - expected).abs().max() < 1e-6


def check_a_collective_is_queued_and_not_waited_for() -> None:
    x = torch.full((3,), 1.0 + dist.get_rank(), device=here())
    take_waits()
    dist.all_reduce(x)
    y = x * 2
    assert not take_waits()
    assert peek(y).tolist() != [6, 6, 6]
    assert y.tolist() == [6, 6, 6]


def check_ddp_trains_as_one_process() -> None:
    compare(DistributedDataParallel)


def check_fsdp2_trains_as_one_process() -> None:
    def shard(model: nn.Sequential) -> nn.Sequential:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(model)

    compare(shard)


def check_dtensors() -> None:
    mesh = init_device_mesh("cuda", (2,))
    tensor = distribute_tensor(torch.arange(8.0, device=here()), mesh, [Shard(0)])
    assert tensor.sum().full_tensor().item() == 28
    assert tensor.to_local().tolist() == [0 + 4 * dist.get_rank() + i for i in range(4)]


def check_groups_do_not_order_each_other() -> None:
    other = dist.new_group(backend="simulated_nccl")
    x, y = torch.ones(3, device=here()), torch.ones(3, device=here())
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in ((x, None), (y, other))[:: 1 if dist.get_rank() else -1]
    ]
    for work in works:
        work.wait()
    assert x.tolist() == y.tolist() == [2, 2, 2]
    dist.destroy_process_group(other)

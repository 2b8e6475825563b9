"""FSDP2 (`fully_shard`) and HSDP: every parameter is sharded along its first dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from distmon.verify.parallelisms.parallelism import (
    BF16,
    DistributedModel,
    Parallelism,
    single_module,
)
from distmon.verify.parallelisms.workload import Workload, part_of

_BF16_COMPUTE = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
)


def shard_units(workload: Workload, mesh: DeviceMesh, **options: Any) -> None:
    """Apply `fully_shard` to every unit and then to the model, in place."""
    for path in workload.units:
        fully_shard(workload.model.get_submodule(path), mesh=mesh, **options)
    fully_shard(workload.model, mesh=mesh, **options)


def _fsdp(workload: Workload, replicas: int = 1, **options: Any) -> DistributedModel:
    ranks = dist.get_world_size()
    if replicas > 1:
        mesh = init_device_mesh(
            "cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    shard_units(workload, mesh, **options)
    return single_module(
        workload.model,
        workload.optimizer(workload.model.named_parameters()),
        workload,
        lambda batch: part_of(batch, dist.get_rank(), ranks),
    )


PARALLELISMS = (
    Parallelism("fsdp", "fully_shard", _fsdp),
    Parallelism(
        "fsdp-no-reshard",
        "fully_shard, reshard_after_forward=False",
        partial(_fsdp, reshard_after_forward=False),
    ),
    Parallelism(
        "fsdp-mixed",
        "fully_shard, bf16 compute",
        partial(_fsdp, mp_policy=_BF16_COMPUTE),
        limits=BF16,
    ),
    Parallelism(
        "fsdp-offload",
        "fully_shard, parameters offloaded to the CPU",
        partial(_fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    ),
    Parallelism(
        "hsdp",
        "fully_shard on a 2-D mesh: 2 replicas of shards",
        partial(_fsdp, replicas=2),
        min_ranks=4,
        rank_multiple=2,
    ),
)

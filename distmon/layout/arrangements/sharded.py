"""FSDP2 (`fully_shard`) and HSDP: every parameter cut along its first dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from distmon.layout.arrangements.arrangement import (
    BF16,
    Arranged,
    Arrangement,
    single_module,
)
from distmon.layout.arrangements.workload import Workload, part_of

_BF16_COMPUTE = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
)


def shard_units(workload: Workload, mesh: DeviceMesh, **options: Any) -> None:
    """`fully_shard` every unit and then the model, in place."""
    for path in workload.units:
        fully_shard(workload.model.get_submodule(path), mesh=mesh, **options)
    fully_shard(workload.model, mesh=mesh, **options)


def _fsdp(workload: Workload, replicas: int = 1, **options: Any) -> Arranged:
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


ARRANGEMENTS = (
    Arrangement("fsdp", "fully_shard", _fsdp),
    Arrangement(
        "fsdp-no-reshard",
        "fully_shard, reshard_after_forward=False",
        partial(_fsdp, reshard_after_forward=False),
    ),
    Arrangement(
        "fsdp-mixed",
        "fully_shard, bf16 compute",
        partial(_fsdp, mp_policy=_BF16_COMPUTE),
        limits=BF16,
    ),
    Arrangement(
        "fsdp-offload",
        "fully_shard, parameters offloaded to the CPU",
        partial(_fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    ),
    Arrangement(
        "hsdp",
        "fully_shard on a 2-D mesh: 2 replicas of shards",
        partial(_fsdp, replicas=2),
        at_least=4,
        multiple_of=2,
    ),
)

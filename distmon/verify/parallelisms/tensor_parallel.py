"""Tensor parallelism: layers sharded by columns and rows, alone or with `fully_shard`.

A model supports it through its plan for `parallelize_module`: attribute `tensor_parallel_plan`, and
`sequence_parallel_plan` for the variant with sequence-parallel norms.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from distmon.verify.parallelisms.fsdp2 import shard_units
from distmon.verify.parallelisms.parallelism import (
    DistributedModel,
    Parallelism,
    UnsupportedModelError,
    single_module,
)
from distmon.verify.parallelisms.workload import Workload, part_of

_TP = 2
"""Size of the tensor-parallel dimension of the 2-D mesh."""


def _apply_plan(workload: Workload, mesh: DeviceMesh, attribute: str) -> None:
    plan = getattr(workload.model, attribute, None)
    if plan is None:
        raise UnsupportedModelError(f"the model has no attribute {attribute}")
    parallelize_module(workload.model, mesh, plan)


def _tensor_parallel(
    workload: Workload, attribute: str = "tensor_parallel_plan"
) -> DistributedModel:
    _apply_plan(workload, init_device_mesh("cpu", (dist.get_world_size(),)), attribute)
    optimizer = workload.optimizer(workload.model.named_parameters())
    # All ranks compute one model, so each gets the whole batch.
    return single_module(workload.model, optimizer, workload, lambda batch: batch)


def _sharded_tensor_parallel(workload: Workload) -> DistributedModel:
    copies = dist.get_world_size() // _TP
    mesh = init_device_mesh("cpu", (copies, _TP), mesh_dim_names=("data", "tensor"))
    _apply_plan(workload, mesh["tensor"], "tensor_parallel_plan")
    shard_units(workload, mesh["data"])
    return single_module(
        workload.model,
        workload.optimizer(workload.model.named_parameters()),
        workload,
        lambda batch: part_of(batch, mesh["data"].get_local_rank(), copies),
    )


PARALLELISMS = (
    Parallelism("tp", "tensor parallel: columns and rows", _tensor_parallel),
    Parallelism(
        "tp-sequence",
        "tensor parallel with sequence-parallel norms",
        partial(_tensor_parallel, attribute="sequence_parallel_plan"),
    ),
    Parallelism(
        "fsdp+tp",
        "fully_shard over tensor parallel, 2-D mesh",
        _sharded_tensor_parallel,
        min_ranks=4,
        rank_multiple=_TP,
    ),
)

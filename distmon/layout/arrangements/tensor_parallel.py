"""Tensor parallelism: layers cut by columns and rows, alone or under `fully_shard`.

A model takes part when it brings its plan for `parallelize_module`: attribute
`tensor_parallel_plan`, and `sequence_parallel_plan` for the variant with sequence-parallel norms.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from distmon.layout.arrangements.arrangement import (
    Arranged,
    Arrangement,
    CannotArrangeError,
    single_module,
)
from distmon.layout.arrangements.sharded import shard_units
from distmon.layout.arrangements.workload import Workload, part_of

_TP = 2
"""Ranks that share a layer where tensor parallelism is combined with sharding."""


def _apply_plan(workload: Workload, mesh: DeviceMesh, attribute: str) -> None:
    plan = getattr(workload.model, attribute, None)
    if plan is None:
        raise CannotArrangeError(f"the model has no attribute {attribute}")
    parallelize_module(workload.model, mesh, plan)


def _tensor_parallel(workload: Workload, attribute: str = "tensor_parallel_plan") -> Arranged:
    _apply_plan(workload, init_device_mesh("cpu", (dist.get_world_size(),)), attribute)
    optimizer = workload.optimizer(workload.model.named_parameters())
    # All ranks work on one model, so each sees the whole batch.
    return single_module(workload.model, optimizer, workload, lambda batch: batch)


def _sharded_tensor_parallel(workload: Workload) -> Arranged:
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


ARRANGEMENTS = (
    Arrangement("tp", "tensor parallel: columns and rows", _tensor_parallel),
    Arrangement(
        "tp-sequence",
        "tensor parallel with sequence-parallel norms",
        partial(_tensor_parallel, attribute="sequence_parallel_plan"),
    ),
    Arrangement(
        "fsdp+tp",
        "fully_shard over tensor parallel, 2-D mesh",
        _sharded_tensor_parallel,
        at_least=4,
        multiple_of=_TP,
    ),
)

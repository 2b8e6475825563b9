"""FSDP1: the parameters of a unit flattened into one vector that is sharded over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from distmon.verify.parallelisms.parallelism import (
    BF16,
    EXACT,
    DistributedModel,
    Parallelism,
    UnsupportedModelError,
    single_module,
)
from distmon.verify.parallelisms.workload import Workload, part_of

_CPU = torch.device("cpu")


def _fsdp1(
    workload: Workload, *, strategy: ShardingStrategy, use_orig_params: bool, mixed: bool = False
) -> DistributedModel:
    if not use_orig_params:
        _refuse_partly_trainable_units(workload)
    options: dict[str, Any] = {
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
        "device_id": _CPU,  # without it FSDP1 requires an accelerator
    }
    ranks = dist.get_world_size()
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh(
            "cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")
        )
    if mixed:
        options["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for path in workload.units:
        unit = FullyShardedDataParallel(workload.model.get_submodule(path), **options)
        parent, _, name = path.rpartition(".")
        workload.model.get_submodule(parent).register_module(name, unit)
    model = FullyShardedDataParallel(workload.model, **options)
    return single_module(
        model,
        workload.optimizer(model.named_parameters()),
        workload,
        lambda batch: part_of(batch, dist.get_rank(), ranks),
    )


def _refuse_partly_trainable_units(workload: Workload) -> None:
    for path in workload.units or ("",):
        unit = workload.model.get_submodule(path)
        if len({p.requires_grad for p in unit.parameters()}) > 1:
            raise UnsupportedModelError(
                f"only some parameters of {path or 'the model'} are trainable, which a "
                "FlatParameter does not support"
            )


_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "no-shard": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def _parallelism(short: str, use_orig_params: bool, mixed: bool = False) -> Parallelism:
    strategy = _STRATEGIES[short]
    hybrid = strategy is ShardingStrategy.HYBRID_SHARD
    return Parallelism(
        name="fsdp1-mixed" if mixed else f"fsdp1-{short}{'' if use_orig_params else '-flat'}",
        summary=f"FSDP1 {strategy.name}, use_orig_params={use_orig_params}"
        + ", bf16 compute" * mixed,
        build=partial(_fsdp1, strategy=strategy, use_orig_params=use_orig_params, mixed=mixed),
        min_ranks=4 if hybrid else 2,
        rank_multiple=2 if hybrid else 1,
        limits=BF16 if mixed else EXACT,
    )


PARALLELISMS = (
    *(_parallelism(short, original) for short in _STRATEGIES for original in (True, False)),
    _parallelism("full", use_orig_params=True, mixed=True),
)

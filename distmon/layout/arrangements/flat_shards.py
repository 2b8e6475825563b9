"""FSDP1: the parameters of a unit in one flat vector that ranks cut into equal pieces."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from distmon.layout.arrangements.arrangement import (
    BF16,
    EXACT,
    Arranged,
    Arrangement,
    CannotArrangeError,
    single_module,
)
from distmon.layout.arrangements.workload import Workload, part_of

_CPU = torch.device("cpu")


def _fsdp1(
    workload: Workload, *, strategy: ShardingStrategy, named: bool, mixed: bool = False
) -> Arranged:
    """`named`: the model keeps its parameters beside the flat vectors (`use_orig_params`)."""
    if not named:
        _refuse_mixed_units(workload)
    options: dict[str, Any] = {
        "sharding_strategy": strategy,
        "use_orig_params": named,
        "device_id": _CPU,  # without it FSDP1 asks for an accelerator
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


def _refuse_mixed_units(workload: Workload) -> None:
    for path in workload.units or ("",):
        unit = workload.model.get_submodule(path)
        if len({p.requires_grad for p in unit.parameters()}) > 1:
            raise CannotArrangeError(
                f"only some parameters of {path or 'the model'} are trainable, and one flat vector "
                "is trainable as a whole"
            )


_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "no-shard": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def _arrangement(short: str, named: bool, mixed: bool = False) -> Arrangement:
    strategy = _STRATEGIES[short]
    hybrid = strategy is ShardingStrategy.HYBRID_SHARD
    return Arrangement(
        name="fsdp1-mixed" if mixed else f"fsdp1-{short}{'' if named else '-flat'}",
        summary=f"FSDP1 {strategy.name}, use_orig_params={named}" + ", bf16 compute" * mixed,
        build=partial(_fsdp1, strategy=strategy, named=named, mixed=mixed),
        at_least=4 if hybrid else 2,
        multiple_of=2 if hybrid else 1,
        limits=BF16 if mixed else EXACT,
    )


ARRANGEMENTS = (
    *(_arrangement(short, named) for short in _STRATEGIES for named in (True, False)),
    _arrangement("full", named=True, mixed=True),
)

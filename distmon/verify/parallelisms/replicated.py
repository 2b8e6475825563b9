"""Parallelisms with the whole model on every rank: no wrapper, DDP, ZeroRedundancyOptimizer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distmon.verify.parallelisms.parallelism import (
    DistributedModel,
    Parallelism,
    UnsupportedModelError,
    single_module,
)
from distmon.verify.parallelisms.workload import Workload, part_of


def plain(workload: Workload) -> DistributedModel:
    """Return the unsharded model on one process, the reference of all parallelisms."""
    optimizer = workload.optimizer(workload.model.named_parameters())
    return single_module(workload.model, optimizer, workload, lambda batch: batch)


def _my_part(batch: torch.Tensor) -> torch.Tensor:
    return part_of(batch, dist.get_rank(), dist.get_world_size())


def _ddp(workload: Workload, **options: Any) -> DistributedModel:
    wrapped = DistributedDataParallel(workload.model, **options)
    return single_module(
        wrapped, workload.optimizer(workload.model.named_parameters()), workload, _my_part
    )


def _accumulating(workload: Workload, microbatches: int = 2) -> DistributedModel:
    wrapped = DistributedDataParallel(workload.model)
    rows = len(workload.batch(1))
    if rows % (microbatches * dist.get_world_size()):
        raise UnsupportedModelError(
            f"{rows} rows cannot be split into {microbatches} equal micro-batches per rank"
        )

    def backward(step: int) -> torch.Tensor:
        mine = _my_part(workload.batch(step))
        total = torch.zeros((), dtype=torch.float64)
        for i in range(microbatches):
            microbatch = part_of(mine, i, microbatches)
            # Only the last backward exchanges gradients.
            with nullcontext() if i == microbatches - 1 else wrapped.no_sync():
                loss = workload.loss(wrapped(microbatch), microbatch) / microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    return DistributedModel(
        [wrapped], [workload.optimizer(workload.model.named_parameters())], backward
    )


def _zero_redundancy(workload: Workload) -> DistributedModel:
    wrapped = DistributedDataParallel(workload.model)
    groups = workload.param_groups(workload.model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(
        groups, optimizer_class=torch.optim.AdamW, lr=1e-3, foreach=False
    )
    return single_module(wrapped, optimizer, workload, _my_part)


PLAIN = Parallelism("plain", "one process, no wrapper", plain, min_ranks=1)
PARALLELISMS = (
    Parallelism("ddp", "DistributedDataParallel", _ddp),
    Parallelism(
        "ddp-bucket-view",
        "DDP whose gradients are views of its buckets",
        partial(_ddp, gradient_as_bucket_view=True),
    ),
    Parallelism("ddp-static-graph", "DDP, static_graph", partial(_ddp, static_graph=True)),
    Parallelism(
        "ddp-find-unused",
        "DDP, find_unused_parameters",
        partial(_ddp, find_unused_parameters=True),
    ),
    Parallelism("ddp-accumulate", "DDP, two backwards per step, one in no_sync", _accumulating),
    Parallelism("zero-redundancy", "ZeroRedundancyOptimizer over DDP", _zero_redundancy),
)

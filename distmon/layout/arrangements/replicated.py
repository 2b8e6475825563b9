"""Every rank has the whole model: no wrapper at all, DDP, and a sharded optimizer over DDP."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distmon.layout.arrangements.arrangement import (
    Arranged,
    Arrangement,
    CannotArrangeError,
    single_module,
)
from distmon.layout.arrangements.workload import Workload, part_of


def plain(workload: Workload) -> Arranged:
    """One process, nothing wrapped: what all others are compared with."""
    optimizer = workload.optimizer(workload.model.named_parameters())
    return single_module(workload.model, optimizer, workload, lambda batch: batch)


def _my_part(batch: torch.Tensor) -> torch.Tensor:
    return part_of(batch, dist.get_rank(), dist.get_world_size())


def _ddp(workload: Workload, **options: Any) -> Arranged:
    wrapped = DistributedDataParallel(workload.model, **options)
    return single_module(
        wrapped, workload.optimizer(workload.model.named_parameters()), workload, _my_part
    )


def _accumulating(workload: Workload, pieces: int = 2) -> Arranged:
    wrapped = DistributedDataParallel(workload.model)
    rows = len(workload.batch(1))
    if rows % (pieces * dist.get_world_size()):
        raise CannotArrangeError(f"{rows} rows cannot be shared by ranks in {pieces} equal pieces")

    def backward(step: int) -> torch.Tensor:
        mine = _my_part(workload.batch(step))
        total = torch.zeros((), dtype=torch.float64)
        for i in range(pieces):
            piece = part_of(mine, i, pieces)
            # Only the last backward exchanges gradients.
            with nullcontext() if i == pieces - 1 else wrapped.no_sync():
                loss = workload.loss(wrapped(piece), piece) / pieces
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    return Arranged([wrapped], [workload.optimizer(workload.model.named_parameters())], backward)


def _zero_redundancy(workload: Workload) -> Arranged:
    wrapped = DistributedDataParallel(workload.model)
    groups = workload.param_groups(workload.model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(
        groups, optimizer_class=torch.optim.AdamW, lr=1e-3, foreach=False
    )
    return single_module(wrapped, optimizer, workload, _my_part)


PLAIN = Arrangement("plain", "one process, no wrapper", plain, at_least=1)
ARRANGEMENTS = (
    Arrangement("ddp", "DistributedDataParallel", _ddp),
    Arrangement(
        "ddp-bucket-view",
        "DDP whose gradients are views of its buckets",
        partial(_ddp, gradient_as_bucket_view=True),
    ),
    Arrangement("ddp-static-graph", "DDP, static_graph", partial(_ddp, static_graph=True)),
    Arrangement(
        "ddp-find-unused",
        "DDP, find_unused_parameters",
        partial(_ddp, find_unused_parameters=True),
    ),
    Arrangement("ddp-accumulate", "DDP, two backwards per step, one in no_sync", _accumulating),
    Arrangement("zero-redundancy", "ZeroRedundancyOptimizer over DDP", _zero_redundancy),
)

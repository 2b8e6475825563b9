"""Gradient norms of tasks over the global batch."""

from __future__ import annotations

import torch.distributed as dist

from distmon.collect.task_gradients import Measured
from distmon.reduce.process_group import Ranks


def reduce_task_norms(ranks: Ranks, measured: Measured) -> dict[str, float]:
    """Return the norm of each task's gradient over the global batch. A collective call.

    The gradient of the global batch is the mean over ranks, and the norm of a mean does not follow
    from the norms of its terms: so the sampled elements are summed, then the norm is taken.
    """
    total = measured.elements
    ranks.all_reduce(total, dist.ReduceOp.SUM)
    norms = (total / ranks.size).square().sum(1).sqrt().cpu().tolist()
    return dict(zip(measured.names, norms, strict=True))

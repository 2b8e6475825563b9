"""Gradient norms of tasks over the global batch."""

from __future__ import annotations

import torch.distributed as dist

from distmon.collect.task_gradients import Measured
from distmon.reduce.locate import SearchSteps


def reduce_task_norms(ranks: int, measured: Measured) -> SearchSteps[dict[str, float]]:
    """Compute the norm of each task's gradient over the global batch of so many ranks.

    The gradient of the global batch is the mean over ranks, and the norm of a mean does not follow
    from the norms of its terms: so the sampled elements are summed, then the norm is taken.
    """
    total = measured.elements.cpu()
    yield total, dist.ReduceOp.SUM
    norms = (total / ranks).square().sum(1).sqrt().tolist()
    return dict(zip(measured.names, norms, strict=True))

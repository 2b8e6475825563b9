"""`--parallel ddp`: every rank holds the whole model and sees its own part of the batch."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch.model import GPT
from launch.parallel.base import Parallelism


class DataParallel(Parallelism):
    """DistributedDataParallel. A single process without torchrun is not wrapped."""

    def wrap(self, model: GPT) -> nn.Module:
        # Evaluation calls the model itself, because it needs no other rank.
        return super().wrap(DistributedDataParallel(model) if self.ranks.has_group else model)

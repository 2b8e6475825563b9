"""`--parallel ddp`: every rank holds the whole model and sees its own part of the batch."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch.model import GPT
from launch.parallel.base import Parallelism


class DataParallel(Parallelism):
    """DistributedDataParallel. A single process without torchrun is not wrapped."""

    def wrap(self, model: GPT) -> nn.Module:
        if not self.ranks.has_group:
            return super().wrap(model)
        # Evaluation calls the model itself, because it needs no other rank.
        self._replica = DistributedDataParallel(model)
        return torch.compile(self._replica) if self.options.compile else self._replica

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if last or not self.ranks.has_group:
            return contextlib.nullcontext()
        return self._replica.no_sync()

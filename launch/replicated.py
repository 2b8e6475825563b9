"""`--parallel ddp`: every rank holds the whole model and sees its own part of the batch."""

from __future__ import annotations

import contextlib

from arrangement import Arrangement
from gpt import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Replicated(Arrangement):
    """DistributedDataParallel. All ranks have the same gradients, and so the same norm."""

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        self._replica = DistributedDataParallel(model)
        # Evaluation needs no other rank.
        return self.compiled(self._replica), model

    def exchanging(self, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self._replica.no_sync()

"""`--parallel fsdp1`: FullyShardedDataParallel, which lays the parameters of a block out flat."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from gpt import GPT, Block
from holdings import Place
from in_pieces import InPieces
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class FlatSharded(InPieces):
    """Each rank holds an equal run of a block's flat parameters, so runs of some parameters."""

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        self.compile_blocks(model)
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=self.device,  # without it FSDP1 looks for a GPU
        )
        return sharded, sharded

    def exchanging(self, last: bool) -> contextlib.AbstractContextManager[object]:
        assert isinstance(self.module, FullyShardedDataParallel)
        return contextlib.nullcontext() if last else self.module.no_sync()

    def places(self, shapes: dict[str, torch.Size]) -> dict[str, Place]:
        """A parameter's runs follow each other in the order of the ranks."""
        del shapes
        mine = {name: parameter.numel() for name, parameter in self.parameters.items()}
        counts: list[dict[str, int]] = [{} for _ in range(self.ranks.world)]
        dist.all_gather_object(counts, mine)
        before = counts[: self.ranks.rank]
        return {
            name: Place((sum(each[name] for each in before),), (count,), flat=True)
            for name, count in mine.items()
        }

"""`--parallel fsdp1`: FullyShardedDataParallel, which lays the parameters of a block out flat."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from launch.model import GPT, Block
from launch.parallel.base import blank_state
from launch.parallel.sharded import Sharded


class FlatSharded(Sharded):
    """Every rank holds an equal range of a block's flat parameters."""

    def wrap(self, model: GPT) -> nn.Module:
        self.compile_blocks(model)
        self.model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=self.device,  # without it FSDP1 looks for a GPU
        )
        return self.model

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.module.no_sync()

    def full_state(self, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add a state for the call where no rank has one: FSDP1 wants one of every parameter."""
        having = [name for name, each in self.parameters.items() if each in optimizer.state]
        missing = self.parameters.keys() - set().union(*self.ranks.gather(having))
        like = next(iter(optimizer.state.values()))
        for name in missing:
            parameter = self.parameters[name]
            optimizer.state[parameter] = blank_state(like, parameter)
        weights, state = super().full_state(optimizer)
        for name in missing:
            optimizer.state.pop(self.parameters[name])
            state.pop(name, None)
        return weights, state

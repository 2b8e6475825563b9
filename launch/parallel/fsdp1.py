"""`--parallel fsdp1`: FullyShardedDataParallel, which lays the parameters of a block out flat."""

from __future__ import annotations

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

    def full_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add a state for the call where no rank has one: FSDP1 wants one of every parameter."""
        states = self.optimizer.state
        having = [name for name, each in self.parameters.items() if each in states]
        missing = self.parameters.keys() - set().union(*self.ranks.gather(having))
        like = next(iter(states.values()))
        for name in missing:
            parameter = self.parameters[name]
            states[parameter] = blank_state(like, parameter)
        weights, state = super().full_state()
        for name in missing:
            states.pop(self.parameters[name])
            state.pop(name, None)
        return weights, state

"""`--parallel fsdp`, `hsdp` and `fsdp+tp`: FSDP2 alone, in replicas, over split layers; `fsdp1`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from launch.model import GPT, Block
from launch.options import Options
from launch.parallel.base import Sizes, blank_state
from launch.parallel.sharded import Sharded
from launch.parallel.tp import check_layers, split_layers
from launch.ranks import BadInput

REPLICAS = 2  # of hsdp
TENSOR = 2  # ranks that split a layer under fsdp+tp, unless --tensor-parallel says otherwise


class FullySharded(Sharded):
    """Every block, and the rest, is gathered when it is needed and freed again.

    The mesh has a dimension for every size that is more than one. Neighbors split layers, which
    exchange most; replicas are furthest apart, because they exchange least.
    """

    def wrap(self, model: GPT) -> nn.Module:
        self.compile_blocks(model)
        sizes = {name: getattr(self.sizes, name) for name in ("replicas", "shards", "tensor")}
        mesh = self.make_mesh(**{name: size for name, size in sizes.items() if size > 1})
        if sizes["tensor"] > 1:
            split_layers(model, mesh["tensor"])
            mesh = mesh["shards"]
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        # FSDP2 warns of in-place changes to its output; nothing here changes logits in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        return fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)
        yield


class HybridSharded(FullySharded):
    """Replicas of sharded models."""

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        if world < 2 * REPLICAS or world % REPLICAS:
            raise BadInput(
                f"--parallel hsdp makes {REPLICAS} replicas of at least 2 shards each and needs "
                f"an even number of ranks from {2 * REPLICAS} on, not {world}"
            )
        return Sizes(REPLICAS, world // REPLICAS, micro_batches=options.accumulate)


class ShardedTensorParallel(FullySharded):
    """Groups of ranks that split every layer; each rank shards its part over the groups."""

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        tensor = options.tensor_parallel or TENSOR
        if world < 2 * tensor or world % tensor:
            raise BadInput(
                f"--parallel fsdp+tp with --tensor-parallel {tensor} needs a multiple of {tensor} "
                f"ranks from {2 * tensor} on, not {world}"
            )
        check_layers(options, tensor)
        return Sizes(shards=world // tensor, tensor=tensor, micro_batches=options.accumulate)


class FlatSharded(Sharded):
    """FSDP1: every rank holds an equal range of a block's flat parameters."""

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

"""`--parallel fsdp`, `hsdp` and `fsdp+tp`: FSDP2 alone, in replicas, or over split layers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import fully_shard

from launch.model import GPT
from launch.options import Options
from launch.parallel.base import Sizes
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

"""`--parallel tp`: every layer is split over the ranks, which all see the same batch."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from launch.model import GPT
from launch.options import Options
from launch.parallel.base import Sizes
from launch.parallel.sharded import Sharded
from launch.ranks import BadInput


class TensorParallel(Sharded):
    """Attention is split by heads, the MLP by its inner width, everything between by time."""

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        check_layers(options, world)
        return Sizes(tensor=world, micro_batches=options.accumulate)

    def wrap(self, model: GPT) -> nn.Module:
        split_layers(model, self.make_mesh(tensor=self.sizes.tensor))
        return model


def check_layers(options: Options, tensor: int) -> None:
    """Raise `BadInput` when `tensor` ranks cannot split a layer."""
    for flag, size in (("heads", options.heads), ("context", options.context)):
        if size % tensor:
            raise BadInput(
                f"--{flag} {size} must be divisible by {tensor}, the ranks that share a layer "
                f"under --parallel {options.parallel}"
            )


def split_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Split the model in place. Between layers each rank holds its part of every sequence."""
    times = Shard(1)
    # Norms see whole vectors; attention and MLP see whole sequences.
    whole = PrepareModuleInput(input_layouts=times, desired_input_layouts=Replicate())
    block = {
        "norm1": SequenceParallel(),
        "attn": whole,
        "attn.qkv": ColwiseParallel(),
        "attn.out": RowwiseParallel(output_layouts=times),
        "norm2": SequenceParallel(),
        "mlp": whole,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=times),
    }
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=times),
        # Positions have no batch: time is their first dimension.
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=times, output_layouts=Replicate()),
        **{f"blocks.*.{name}": style for name, style in block.items()},
    }
    parallelize_module(model, mesh, plan)
    if model.shape.tied:
        # Both are split by rows, but each became a parameter of its own.
        model.head.weight = model.embed.weight

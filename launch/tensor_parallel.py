"""`--parallel tp`: every layer is split over the ranks, which all see the same batch."""

from __future__ import annotations

from distributed_tensors import DistributedTensors
from gpt import GPT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class TensorParallel(DistributedTensors):
    """Attention by heads, the MLP by its inner width, everything between by time."""

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        split_layers(model, self.make_mesh(tensor=self.ranks.world))
        return model, model


def split_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Split the model in place. Between layers each rank holds its part of every sequence."""
    times = Shard(1)
    # Heads and norms see whole vectors; attention and MLP see whole sequences.
    whole = PrepareModuleInput(input_layouts=times, desired_input_layouts=Replicate())
    block: dict[str, ParallelStyle] = {
        "norm1": SequenceParallel(),
        "attn": whole,
        "attn.qkv": ColwiseParallel(),
        "attn.out": RowwiseParallel(output_layouts=times),
        "norm2": SequenceParallel(),
        "mlp": whole,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=times),
    }
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=times),
        # Positions have no batch: time is their first dimension.
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=times, output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan |= {f"blocks.{number}.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, plan)
    if model.shape.tied:
        # Both are split by rows, but each into a parameter of its own.
        model.head.weight = model.embed.weight

"""`--parallel fsdp`, `hsdp` and `fsdp+tp`: FSDP2, alone, over replicas, or over split layers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from distributed_tensors import DistributedTensors
from gpt import GPT
from tensor_parallel import split_layers
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class FullySharded(DistributedTensors):
    """Each block and the rest is gathered when it is needed and dropped again.

    The mesh has a dimension for every size of the division that is more than one. Neighbouring
    ranks split layers, which talk most; replicas are furthest apart, because they talk least.
    """

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        self.compile_blocks(model)
        division = self.conditions.division
        sizes = {
            "replicas": division.replicas,
            "shards": division.shards,
            "tensor": division.tensor,
        }
        sizes = {name: size for name, size in sizes.items() if size > 1}
        mesh = self.make_mesh(**sizes)
        if "tensor" in sizes:
            split_layers(model, mesh["tensor"])
            mesh = mesh["shards"]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # Nothing here changes logits in place, which is what FSDP2 warns of.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        return model, model

    @contextlib.contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        yield

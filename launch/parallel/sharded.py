"""What the parallelisms have in common under which no rank has all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from launch.model import GPT
from launch.options import Options
from launch.parallel.base import MicroBatch, Parallelism, Sizes
from launch.ranks import local


class Sharded(Parallelism):
    """Every rank holds shards of some parameters; some shards may be on several ranks."""

    mesh: DeviceMesh | None = None

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        return Sizes(shards=world, micro_batches=options.accumulate)

    def make_mesh(self, **sizes: int) -> DeviceMesh:
        """Return the mesh of all ranks with these dimensions; neighbors differ in the last."""
        names, shape = tuple(sizes), tuple(sizes.values())
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self.mesh

    def compile_blocks(self, model: GPT) -> None:
        """Compile every block in place, if requested; before sharding, which works on blocks."""
        if self.options.compile:
            for block in model.blocks.values():
                block.compile()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        loss = super().forward_backward(micro_batches)
        for parameter in self.parameters.values():
            grad = parameter.grad
            # Partial under tensor parallelism: a norm's gradient on this rank's part of sequences.
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        return loss

    def gradient_norm(self) -> torch.Tensor:
        """Reduce the norms of all ranks' shards, in one collective.

        `get_total_norm` on the whole gradients would need one per parameter under FSDP2, sees the
        own shard only under FSDP1, and its own stage only in a pipeline.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for copies, parameters in self._by_copies().items():
            grads = [local(each.grad) for each in parameters if each.grad is not None]
            # What several ranks hold counts once in the sum over ranks.
            square += nn.utils.get_total_norm(grads).double() ** 2 / copies
        return self.ranks.sum(square).sqrt().float()

    def _by_copies(self) -> dict[int, list[nn.Parameter]]:
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault(self.shards.copies(name), []).append(parameter)
        return groups

    def close(self) -> None:
        # Caches of DTensor keep the mesh, and the mesh keeps the process groups and their threads.
        getattr(self.mesh, "_pg_registry", {}).clear()

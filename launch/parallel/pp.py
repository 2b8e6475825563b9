"""`--parallel pp`: every rank holds some consecutive blocks and passes activations on."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from launch.model import GPT, cross_entropy, embed_bytes
from launch.options import Options
from launch.parallel.base import MicroBatch, Sizes
from launch.parallel.sharded import Sharded
from launch.ranks import BadInput


class Stage(nn.Module):
    """A part of the model, with the names of the whole: the second may begin with `blocks.2`."""

    def __init__(self, model: GPT, number: int, stages: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        own = range(layers * number // stages, layers * (number + 1) // stages)
        self.is_first, self.is_last = number == 0, number == stages - 1
        if self.is_first:
            self.embed, self.positions = model.embed, model.positions
        self.blocks = nn.ModuleDict({str(each): model.blocks[each] for each in own})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations, or logits on the last stage, from ids or the activations before."""
        if self.is_first:
            x = embed_bytes(x, self.embed, self.positions)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class PipelineParallel(Sharded):
    """One stage per rank. Only the last has a loss."""

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        if world > options.layers:
            raise BadInput(
                f"--parallel pp needs a block for each of its {world} stages and "
                f"--layers is {options.layers}"
            )
        if options.tied:
            raise BadInput(
                "--tied does not work with --parallel pp: embedding and head are on different ranks"
            )
        # With fewer micro-batches than stages some stages would never have anything to do.
        return Sizes(stages=world, micro_batches=max(options.accumulate, world))

    def wrap(self, model: GPT) -> nn.Module:
        self.compile_blocks(model)
        stages, number = self.ranks.world, self.ranks.rank
        self._width, self._dtype = model.shape.width, getattr(torch, model.shape.dtype)
        self._stage = self.model = Stage(model, number, stages)
        self._factor = 1.0
        self._schedule = Schedule1F1B(
            PipelineStage(self._stage, number, stages, self.device),
            self.sizes.micro_batches,
            loss_fn=lambda logits, targets: cross_entropy(logits, targets) * self._factor,
            scale_grads=False,  # the factor on the loss makes it the mean
        )
        return self._stage

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        inputs, targets, factors = zip(*micro_batches, strict=True)
        self._factor = factors[0]
        losses: list[torch.Tensor] = []
        with self.autocast():
            self._schedule.step(
                *([torch.cat(inputs)] if self._stage.is_first else []),
                target=torch.cat(targets) if self._stage.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        return torch.stack(losses).sum().detach() if losses else None

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Pass one batch through the stages; unlike the schedule, with any number of sequences."""
        rank, x = self.ranks.rank, inputs
        if not self._stage.is_first:
            x = torch.empty(*inputs.shape, self._width, dtype=self._dtype, device=self.device)
            dist.recv(x, rank - 1)
        with self.autocast():
            x = self._stage(x)
        if self._stage.is_last:
            return cross_entropy(x, targets)
        # With autocast and without residual connections it is bfloat16; the next expects one dtype.
        dist.send(x.to(self._dtype), rank + 1)
        return None

    def displayed_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Broadcast the loss of the last stage; the first is the one that prints."""
        loss = torch.zeros((), device=self.device) if loss is None else loss.clone()
        dist.broadcast(loss, self.ranks.world - 1)
        return loss

    def full_state(self, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gather the states of all stages on rank 0."""
        options = dcp.StateDictOptions(cpu_offload=True)
        own = (
            dcp.get_model_state_dict(self.model, options=options),
            dcp.get_optimizer_state_dict(self.model, optimizer, options=options)["state"],
        )
        stages = [None] * self.ranks.world if self.ranks.is_main else None
        dist.gather_object(own, stages)
        weights, states = zip(*(stages or [({}, {})]), strict=True)
        return dict(ChainMap(*weights)), dict(ChainMap(*states))

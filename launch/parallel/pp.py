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

from launch.model import GPT, cross_entropy
from launch.options import Options
from launch.parallel.base import MicroBatch, Sizes
from launch.parallel.sharded import Sharded
from launch.ranks import BadInput


class PipelineParallel(Sharded):
    """One stage per rank. Only the last has a loss."""

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        if world > options.layers:
            raise BadInput(
                f"--parallel pp needs a block for each of its {world} stages and "
                f"--layers is {options.layers}"
            )
        # With fewer micro-batches than stages some stages would never have anything to do.
        return Sizes(stages=world, micro_batches=max(options.accumulate, world))

    def wrap(self, model: GPT) -> nn.Module:
        self.compile_blocks(model)
        stages, number, layers = self.ranks.world, self.ranks.rank, model.shape.layers
        # What is left keeps its name in the whole model: the second stage may begin with blocks.2.
        own = range(layers * number // stages, layers * (number + 1) // stages)
        for block in set(range(layers)) - set(own):
            del model.blocks[str(block)]
        if number > 0:
            model.embed = model.positions = None
        if number < stages - 1:
            model.norm = model.head = None
        self._stage = PipelineStage(model, number, stages, self.device)
        self._width, self._dtype = model.shape.width, getattr(torch, model.shape.dtype)
        self._factor = 1.0
        self._schedule = Schedule1F1B(
            self._stage,
            self.sizes.micro_batches,
            loss_fn=lambda logits, targets: cross_entropy(logits, targets) * self._factor,
            scale_grads=False,  # the factor on the loss makes it the mean
        )
        return model

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
            x = self.model(x)
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

    def full_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gather the states of all stages on rank 0."""
        options = dcp.StateDictOptions(cpu_offload=True)
        weights, state = dcp.get_state_dict(self.model, self.optimizer, options=options)
        stages = [None] * self.ranks.world if self.ranks.is_main else None
        dist.gather_object((weights, state["state"]), stages)
        weights, states = zip(*(stages or [({}, {})]), strict=True)
        return dict(ChainMap(*weights)), dict(ChainMap(*states))

"""`--parallel pp`: every rank holds some consecutive blocks and passes activations on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from arrangement import MicroBatch
from gpt import GPT, embedded, loss_of
from in_pieces import InPieces
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stage(nn.Module):
    """A part of the model, under the names of the whole: the second may begin with `blocks.2`."""

    def __init__(self, model: GPT, number: int, stages: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        mine = range(layers * number // stages, layers * (number + 1) // stages)
        self.is_first, self.is_last = number == 0, number == stages - 1
        if self.is_first:
            self.embed, self.positions = model.embed, model.positions
        self.blocks = nn.ModuleDict({str(each): model.blocks[each] for each in mine})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From ids or the activations of the stage before to activations or logits."""
        if self.is_first:
            x = embedded(x, self.embed, self.positions)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class Pipeline(InPieces):
    """One stage per rank. Only the last has a loss."""

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        self.compile_blocks(model)
        stages, number = self.ranks.world, self.ranks.rank
        self._width, self._dtype = model.shape.width, getattr(torch, model.shape.dtype)
        self._stage = Stage(model, number, stages)
        self._loss_factor = 1.0
        self._schedule = Schedule1F1B(
            PipelineStage(self._stage, number, stages, self.device),
            self.conditions.division.micro_batches,
            loss_fn=lambda logits, targets: loss_of(logits, targets) * self._loss_factor,
            scale_grads=False,  # the factor on the loss already makes it the mean
        )
        return self._stage, self._stage

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        self._loss_factor = micro_batches[0].factor
        inputs: list[torch.Tensor] = []
        targets: torch.Tensor | None = None
        losses: list[torch.Tensor] = []
        if self._stage.is_first:
            inputs = [torch.cat([each.inputs for each in micro_batches])]
        if self._stage.is_last:
            targets = torch.cat([each.targets for each in micro_batches])
        with self.autocast():
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else None

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """A plain pass through the stages; calls may have different numbers of sequences."""
        rank, x = self.ranks.rank, inputs
        if not self._stage.is_first:
            x = torch.empty(*inputs.shape, self._width, dtype=self._dtype, device=self.device)
            dist.recv(x, rank - 1)
        with self.autocast():
            x = self._stage(x)
        if self._stage.is_last:
            return loss_of(x, targets)
        # With autocast and without residual connections it is bfloat16; the next expects one dtype.
        dist.send(x.to(self._dtype), rank + 1)
        return None

    def shown(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The last stage tells the others, of which the first is the one that speaks."""
        shared = torch.zeros((), device=self.device) if loss is None else loss.clone()
        dist.broadcast(shared, self.ranks.world - 1)
        return shared

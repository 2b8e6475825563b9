"""What the training loop asks of a mode of parallelism; here, the answers of a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import GPT
from holdings import Holdings, Place, everything
from modes import Division
from ranks import Ranks
from tasks import Tasks
from torch import nn

# What wrappers put into the names of parameters.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}


@dataclass(frozen=True)
class MicroBatch:
    """A part of this rank's part of the batch, on the device, and the factor on its loss."""

    inputs: torch.Tensor
    targets: torch.Tensor
    factor: float


@dataclass(frozen=True)
class Conditions:
    """What a mode is asked to work with."""

    division: Division
    ranks: Ranks
    device: torch.device
    bf16: bool
    compile: bool
    kind_weight: float | None = None
    """Factor on the second task's loss; None: there is no second task."""


class Arrangement:
    """A model spread over the ranks, and everything about training it that depends on how.

    All ranks make one together, from the same whole model on the device, and call the same methods
    in the same order: most of them are collectives. Per step these are `gradients`,
    `gradient_norm`, `clip`, then the optimizer's own step on `parameters`.
    """

    def __init__(self, model: GPT, conditions: Conditions) -> None:
        self.conditions = conditions
        self.ranks, self.device = conditions.ranks, conditions.device
        self.tasks = Tasks(self.device, conditions.kind_weight)
        self.show_tasks: Callable[[Mapping[str, torch.Tensor]], object] | None = None
        """Called once per step with the losses of the tasks, before the backward pass."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.aliases = {"head.weight": "embed.weight"} if model.shape.tied else {}
        """Second names of parameters, which a whole state has too."""
        self.module, self.evaluated = self.wrap(model)
        """What this rank calls in training, to which a monitor is attached, and in evaluation."""
        # Taken once: FSDP shows other tensors under the same names between forward and backward.
        self.parameters = {
            plain_name(name): parameter for name, parameter in self.module.named_parameters()
        }
        """This rank's parameters, or pieces of them, under their names in the whole model."""
        self.holdings = self._survey(shapes)

    # What the modes answer differently.

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        """Spread the model over the ranks; returns what training and what evaluation calls."""
        return self.compiled(model), model

    def adopt(
        self, optimizer: torch.optim.Optimizer, sequences: int, clip: float
    ) -> torch.optim.Optimizer:
        """Take in the optimizer of `parameters`; returns the one that the loop works with.

        `sequences` are those of a micro-batch, `clip` is the largest gradient norm.
        """
        del sequences, clip
        return optimizer

    def exchanging(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Around forward and backward of a micro-batch: ranks exchange gradients in the last."""
        del last
        return contextlib.nullcontext()

    def finish_gradients(self) -> None:
        """After the last micro-batch: make `grad` the gradient of the global batch."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements that this rank holds of a parameter, gradient or state, for in-place use."""
        return tensor.detach()

    def places(self, shapes: dict[str, torch.Size]) -> dict[str, Place]:
        """Where the pieces in `parameters` lie in the whole ones."""
        return {name: everything(shapes[name]) for name in self.parameters}

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Forward and backward over a step; returns this rank's own loss, if it computes one."""
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with self.exchanging(last):
                with self.autocast():
                    outputs = self.module(batch.inputs)
                losses = self.tasks.losses(outputs, batch.targets)
                if self.show_tasks and last:
                    self.show_tasks(losses)
                loss = torch.stack([*losses.values()]).sum() * batch.factor
                loss.backward()
            total += loss.detach()
        self.finish_gradients()
        return total

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the gradient of the global batch. It changes no gradient."""
        return nn.utils.get_total_norm(
            [each.grad for each in self.parameters.values() if each.grad is not None]
        )

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""
        nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, norm)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """The loss on this rank's sequences, if this rank computes one."""
        with self.autocast():
            outputs = self.evaluated(inputs)
        return self.tasks.loss(outputs, targets)

    def shown(self, loss: torch.Tensor | None) -> torch.Tensor:
        """A loss to show for what `gradients` returned; the mean over ranks is the global one."""
        assert loss is not None
        return loss

    def release(self) -> None:
        """After the run: let go of what would keep process groups alive. Nothing works after it."""

    # What is the same for all.

    def autocast(self) -> torch.autocast:
        """Around every forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.conditions.bf16)

    def compiled(self, module: nn.Module) -> nn.Module:
        """The module, compiled if asked for."""
        if not self.conditions.compile:
            return module
        return torch.compile(module)  # type: ignore[return-value]

    def _survey(self, shapes: dict[str, torch.Size]) -> Holdings:
        mine = {name: place for name, place in self.places(shapes).items() if place.count}
        everyone = [mine]
        if self.ranks.grouped:
            everyone = [{} for _ in range(self.ranks.world)]
            dist.all_gather_object(everyone, mine)
        return Holdings(shapes, everyone)


def plain_name(name: str) -> str:
    """The name that a parameter has in the model before it is wrapped."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

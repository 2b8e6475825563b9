"""What the training loop calls of a parallelism; here, as it is for `--parallel ddp`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch.model import GPT, TaskLosses
from launch.optimizer import build_optimizer
from launch.options import Options
from launch.ranks import BadInput, Ranks, local


@dataclass(frozen=True)
class Sizes:
    """How many ranks share what. The product of the first four is the number of ranks."""

    replicas: int = 1
    """Copies of the model that see different data."""
    shards: int = 1
    """Shards of every parameter whose holders see different data."""
    tensor: int = 1
    """Shards of every layer whose holders see the same data."""
    stages: int = 1
    """Consecutive parts of the model."""
    micro_batches: int = 1
    """Forward and backward passes of a step."""

    @property
    def data(self) -> int:
        """Parts that a batch is cut into."""
        return self.replicas * self.shards

    def data_rank(self, rank: int) -> int:
        """Return which part of the batch a rank sees."""
        return rank // (self.tensor * self.stages)

    def check_batch(self, batch_size: int) -> None:
        """Raise `BadInput` when the batch cannot be cut into micro-batches for all ranks."""
        parts = self.data * self.micro_batches
        if batch_size % parts == 0:
            return
        if self.stages > 1:
            factors = f"{self.micro_batches} micro-batches for {self.stages} stages"
        else:
            holder = "rank" if self.tensor == 1 else "group"
            factors = f"{self.data} {holder}{'s' * (self.data > 1)}"
            factors += f" of {self.tensor} ranks" * (self.tensor > 1)
            factors += f" x --accumulate {self.micro_batches}"
        raise BadInput(
            f"--batch-size {batch_size} must be divisible by {parts}, which is {factors}"
        )


class MicroBatch(NamedTuple):
    """A part of this rank's part of the batch, on the device, and the factor on its loss."""

    inputs: torch.Tensor
    targets: torch.Tensor
    factor: float


@dataclass(frozen=True)
class ShardTable:
    """Which rank holds how much of which parameter; equal on every rank."""

    shapes: dict[str, torch.Size]
    """Of all parameters of the whole model, by name."""
    counts: list[dict[str, int]]
    """Elements held, by rank and name."""

    def holders(self, name: str) -> list[int]:
        """Return the ranks that hold elements of a parameter."""
        return [rank for rank, counts in enumerate(self.counts) if counts.get(name)]

    def copies(self, name: str) -> int:
        """Return how many ranks hold each element of a parameter."""
        return sum(counts.get(name, 0) for counts in self.counts) // self.shapes[name].numel()


class Parallelism:
    """A model distributed over the ranks, and what about training it depends on how. Here: DDP.

    All ranks build one together, from the same whole model on the device, and call the same methods
    in the same order: most of them are collectives. Each step calls `forward_backward`,
    `gradient_norm` and `optimizer_step`.
    """

    reports_steps = False
    """Whether `module` itself reports steps and gradient norms to the monitor."""

    def __init__(self, model: GPT, options: Options, ranks: Ranks, device: torch.device) -> None:
        self.options, self.ranks, self.device = options, ranks, device
        self.sizes = self.divide(options, ranks.world)
        self.task_losses = TaskLosses(options.kind_weight, device)
        self.report_tasks: Callable[[Mapping[str, torch.Tensor]], object] | None = None
        """Called once per step with the loss of each task, before the backward pass."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.model: nn.Module = model
        """What is evaluated and checkpointed: this rank's shards under the model's own names."""
        self.module = self.wrap(model)
        """What training calls, and what a monitor is attached to."""
        # Read once: FSDP has other tensors under the same names between forward and backward.
        self.parameters = {
            name.replace("_fsdp_wrapped_module.", ""): parameter
            for name, parameter in self.model.named_parameters()
        }
        """This rank's parameters, or shards of them, by name in the whole model."""
        counts = {name: local(each).numel() for name, each in self.parameters.items()}
        self.shards = ShardTable(shapes, ranks.gather(counts))
        self.optimizer = build_optimizer(self.parameters, shapes, options)

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        """Return how `world` ranks divide, or raise `BadInput` when they or the model cannot."""
        return Sizes(replicas=world, micro_batches=options.accumulate)

    def wrap(self, model: GPT) -> nn.Module:
        """Distribute the model, and return the module that training calls."""
        # Evaluation calls the model itself, because it needs no other rank.
        module = DistributedDataParallel(model) if self.ranks.has_group else model
        return torch.compile(module) if self.options.compile else module

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Return the context of one micro-batch; ranks exchange gradients in the last one only."""
        has_switch = hasattr(self.module, "no_sync")  # DDP and FSDP1
        return contextlib.nullcontext() if last or not has_switch else self.module.no_sync()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Fill the gradients of a step; return this rank's own loss, if it computes one."""
        total = torch.zeros((), device=self.device)
        for number, (inputs, targets, factor) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with self.gradient_sync(last):
                with self.autocast():
                    outputs = self.module(inputs)
                losses = self.task_losses(outputs, targets)
                if self.report_tasks and last:
                    self.report_tasks(losses)
                loss = sum(losses.values()) * factor
                self.backward(loss)
            total += loss.detach()
        return total

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch."""
        loss.backward()

    def gradient_norm(self) -> torch.Tensor | None:
        """Return the norm of the gradient of the global batch, if it is known before the step."""
        return nn.utils.get_total_norm(
            [each.grad for each in self.parameters.values() if each.grad is not None]
        )

    def optimizer_step(self, norm: torch.Tensor | None) -> None:
        """Clip the gradients, whose norm is `norm`, and update the parameters."""
        nn.utils.clip_grads_with_norm_(self.parameters.values(), self.options.clip, norm)
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the loss on this rank's sequences, if this rank computes one."""
        with self.autocast():
            outputs = self.model(inputs)
        return sum(self.task_losses(outputs, targets).values())

    def displayed_loss(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return a loss on every rank, the mean of which over ranks is the global one."""
        assert loss is not None
        return loss

    def full_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return whole weights and optimizer state by parameter name; empty except on rank 0."""
        from torch.distributed.checkpoint import state_dict as dcp

        # FSDP1 copies to the CPU and then frees the original, which on the CPU is the same memory.
        offload = self.device.type != "cpu"
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        weights, state = dcp.get_state_dict(self.model, self.optimizer, options=options)
        return (weights, state["state"]) if self.ranks.is_main else ({}, {})

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load what `full_state` returned, under whatever parallelism; each rank has all of it."""
        from torch.distributed.checkpoint import state_dict as dcp

        names = {parameter: name for name, parameter in self.parameters.items()}
        groups = [
            {**group, "params": [names[each] for each in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        content = {"state": state, "param_groups": groups}
        options = dcp.StateDictOptions(full_state_dict=True, strict=False)
        dcp.set_optimizer_state_dict(self.model, self.optimizer, content, options=options)
        # torch makes a state for every parameter; one that never had a gradient has none.
        for name in self.parameters.keys() - state.keys():
            self.optimizer.state.pop(self.parameters[name], None)

    def close(self) -> None:
        """Release what would keep process groups alive. Nothing works after it."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of every forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16)


def blank_state(like: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer state of another parameter with zeros for this one."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    return {key: zeros.clone() if value.ndim else value.clone() for key, value in like.items()}

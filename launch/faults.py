"""Real faults and slowdowns, planted by `--inject` to see whether the monitor finds them."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from launch.ranks import BadInput, local

if TYPE_CHECKING:
    from launch.options import Options
    from launch.parallel.base import Parallelism, ShardTable

UP = "mlp.up.weight"
SPIKE_FACTOR = 50.0
NOISE = 0.01  # of the weight's own root mean square
DEPTH = 20.0  # how far below zero the units of a dead MLP are; GELU is zero there too
LEAK_BYTES = 8 << 20  # in every step


class Kind(NamedTuple):
    """What is known of a kind of fault before it is planted."""

    help: str
    place: str = "parameter"
    one_rank: bool = False
    """Whether it happens on one rank, by default the last that can have it, or on all."""
    lasts: bool = False
    """Whether it happens from its step on, or in that step only."""


FAULTS = {
    "frozen": Kind("drops a gradient from that step on, as a misplaced hook does", lasts=True),
    "nan": Kind("makes one gradient element NaN, on one rank", one_rank=True),
    "spike": Kind("trains one step on random bytes, with 50 times the loss", "batch"),
    "desync": Kind("adds a little noise to one weight, on one rank", one_rank=True),
    "dead": Kind("pushes the weights of an MLP to where no unit is ever active"),
    "straggler": Kind("delays every forward pass of one rank", "machine", True, True),
    "slow_data": Kind("delays every batch, as a slow file system does", "machine", lasts=True),
    "memory_leak": Kind("keeps 8 MB per step on one rank", "machine", True, True),
}
"""The choices of `--inject`; the last three are slowdowns."""


@dataclass
class Fault:
    """What `--inject` plants, or nothing. The training loop calls it at four points of a step.

    Where a rank holds a shard of the parameter, the fault is in that shard.
    """

    options: Options
    parallel: Parallelism | None = None
    name: str = ""
    """Of the parameter that the fault is in, if it is in one."""
    rank: int | None = None
    """The rank that it happens on; None: all of them."""
    here: bool = False
    """Whether it happens on this rank."""
    step: int = 0
    leaked: list[torch.Tensor] = field(default_factory=list)

    def describe(self) -> str:
        """Return one line about what is about to happen."""
        options, kind = self.options, FAULTS[self.options.inject]
        what = {"parameter": f" into {self.name}", "batch": " into the batch"}.get(kind.place, "")
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        when = f"{'from' if kind.lasts else 'at'} step {options.inject_at}"
        return f"injecting {options.inject}{what} on {where} {when}"

    def happens(self, kind: str, step: int) -> bool:
        """Return whether a fault of this kind happens on this rank in this step."""
        at = self.options.inject_at
        is_now = step == at or (step > at and FAULTS[kind].lasts)
        return self.here and self.options.inject == kind and is_now

    @property
    def parameter(self) -> nn.Parameter | None:
        """This rank's shard; None where it holds nothing of the parameter."""
        return self.parallel.parameters.get(self.name)

    def before_data(self, step: int) -> None:
        """Act when a step begins, before its batch is there."""
        self.step = step
        if self.happens("slow_data", step):
            time.sleep(self.options.inject_seconds)
        if self.happens("memory_leak", step):
            self.leaked.append(torch.ones(LEAK_BYTES, dtype=torch.uint8))

    def change_batch(
        self, step: int, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return the inputs and targets to train on, and the factor on their loss."""
        if not self.happens("spike", step):
            return inputs, targets, 1.0
        generator = torch.Generator().manual_seed(self.options.seed)
        garbage = [torch.randint(0, 256, inputs.shape, generator=generator) for _ in range(2)]
        return garbage[0], garbage[1], SPIKE_FACTOR

    def in_forward(self, *_: object) -> None:
        """Act as a forward pre-hook of the model, except in evaluation."""
        if self.happens("straggler", self.step) and torch.is_grad_enabled():
            time.sleep(self.options.inject_seconds)

    def after_backward(self, step: int) -> None:
        """Act on the final gradients, before their norm is taken."""
        if self.happens("nan", step):
            grad = local(self.parameter.grad)
            grad[(0,) * grad.ndim] = float("nan")
        if self.happens("frozen", step) and self.parameter is not None:
            # `requires_grad_(False)` in mid-run would make DDP wait for the gradient for ever.
            self.parameter.grad = None

    def after_step(self, step: int) -> None:
        """Act when the optimizer has stepped."""
        if self.happens("desync", step):
            weight = local(self.parameter)
            generator = torch.Generator().manual_seed(self.options.seed)
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(noise, alpha=NOISE * float(weight.square().mean().sqrt()))
        if self.happens("dead", step):
            # Inputs of mean 1 meet weights of mean -DEPTH / width: the sum is about -DEPTH.
            bias = self.parallel.parameters.get(self.name.removesuffix(UP) + "norm2.bias")
            if bias is not None:
                local(bias).fill_(1.0)
            if self.parameter is not None:
                local(self.parameter).sub_(DEPTH / self.parallel.shards.shapes[self.name][1])


def plan_fault(options: Options, parallel: Parallelism) -> Fault:
    """Return the fault of `--inject`, checked against who holds what; equal on all ranks."""
    if options.inject is None:
        return Fault(options)
    kind, rank, shards = FAULTS[options.inject], options.inject_rank, parallel.shards
    world, data_rank = len(shards.counts), parallel.sizes.data_rank
    if rank is not None and rank >= world:
        raise BadInput(f"--inject-rank {rank} is out of range; ranks are 0 to {world - 1}")
    name, holders = "", list(range(world))
    if kind.place == "parameter":
        name = choose_parameter(options, shards)
        holders = shards.holders(name)
    elif options.inject_param is not None:
        raise BadInput(f"--inject {options.inject} is in no parameter; leave --inject-param out")
    if rank is None and kind.one_rank:
        rank = holders[-1]
    if rank is not None and rank not in holders:
        raise BadInput(
            f"--inject-rank {rank} holds nothing of {name} under --parallel {options.parallel}; "
            f"rank {holders[-1]} does"
        )
    never_stepped = options.inject == "frozen" and options.inject_at == 1
    if never_stepped and rank is not None and len(holders) > shards.copies(name):
        raise BadInput(
            f"--inject frozen on one of the ranks that share {name} needs --inject-at 2 or later, "
            "so that all of them have an optimizer state to save"
        )
    here = rank is None or rank == parallel.ranks.rank
    if kind.place == "batch" and rank is not None:
        here = data_rank(rank) == data_rank(parallel.ranks.rank)  # they see the same batch
    fault = Fault(options, parallel, name, rank, here)
    if options.inject == "straggler":
        parallel.module.register_forward_pre_hook(fault.in_forward)
    return fault


def choose_parameter(options: Options, shards: ShardTable) -> str:
    """Return `--inject-param`, or a parameter amid the model that can have the fault."""
    name, names = options.inject_param, list(shards.shapes)
    if name is not None and name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise BadInput(f'--inject-param "{name}" is no parameter{hint}')
    if options.inject == "dead":
        if name is not None and not name.endswith(UP):
            raise BadInput(f"--inject dead needs the {UP} of a block, and {name} is none")
        if options.inject_rank is not None:
            raise BadInput("--inject dead happens on all ranks; leave --inject-rank out")
    if options.inject == "desync":
        if len(shards.counts) == 1:
            raise BadInput("--inject desync needs at least 2 ranks; start with torchrun")
        names = [each for each in names if shards.copies(each) > 1]
        refusal = f"--inject desync needs copies, and --parallel {options.parallel} makes none"
        if not names:
            raise BadInput(refusal)
        if name is not None and name not in names:
            raise BadInput(f"{refusal} of {name}, but of {names[len(names) // 2]}")
    if name is not None:
        return name
    likely = next(
        found
        for ending in (UP, "norm1.weight", "")
        if (found := [each for each in names if each.endswith(ending)])
    )
    return likely[len(likely) // 2]

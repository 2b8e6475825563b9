"""Real faults and slowdowns, planted by `--inject` to see whether the monitor finds them."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from launch.ranks import BadInput, local

if TYPE_CHECKING:
    from launch.options import Options
    from launch.parallel.base import MicroBatch, Parallelism, ShardTable

UP = "mlp.up.weight"
SPIKE_FACTOR = 50.0
NOISE = 0.01  # of the weight's own root mean square
DEPTH = 20.0  # how far below zero the units of a dead MLP are; GELU is zero there too
LEAK_BYTES = 8 << 20  # in every step


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

    @property
    def parameter(self) -> nn.Parameter | None:
        """This rank's shard; None where it holds nothing of the parameter."""
        return self.parallel.parameters.get(self.name)

    def describe(self) -> str:
        """Return one line about what is about to happen."""
        options, kind = self.options, FAULTS[self.options.inject]
        place = "the batch" if kind.point == "batch" else self.name
        what = f" into {place}" if place else ""
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        when = f"{'from' if kind.lasts else 'at'} step {options.inject_at}"
        return f"injecting {options.inject}{what} on {where} {when}"

    def happens(self, point: str, step: int) -> bool:
        """Return whether there is a fault at this point of this step on this rank."""
        kind, at = FAULTS.get(self.options.inject), self.options.inject_at
        is_now = kind is not None and (step == at or (step > at and kind.lasts))
        return self.here and is_now and kind.point == point

    def act(self, point: str, step: int) -> None:
        """Do what is to be done at this point of a step."""
        self.step = step
        if self.happens(point, step):
            FAULTS[self.options.inject].act(self)

    def change_batch(self, step: int, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch to train on."""
        return spike(self, batch) if self.happens("batch", step) else batch

    def in_forward(self, *_: object) -> None:
        """Act as a forward pre-hook of the model, except in evaluation."""
        if torch.is_grad_enabled():
            self.act("forward", self.step)


def frozen(fault: Fault) -> None:
    """drops a gradient from that step on, as a misplaced hook does"""
    if fault.parameter is not None:
        # `requires_grad_(False)` in mid-run would make DDP wait for the gradient for ever.
        fault.parameter.grad = None


def nan(fault: Fault) -> None:
    """makes one gradient element NaN, on one rank"""
    grad = local(fault.parameter.grad)
    grad[(0,) * grad.ndim] = float("nan")


def spike(fault: Fault, batch: MicroBatch) -> MicroBatch:
    """trains one step on random bytes, with 50 times the loss"""
    draw = torch.Generator().manual_seed(fault.options.seed)
    garbage = [torch.randint(0, 256, batch.inputs.shape, generator=draw) for _ in range(2)]
    inputs, targets = (each.to(batch.inputs.device) for each in garbage)
    return batch._replace(inputs=inputs, targets=targets, factor=batch.factor * SPIKE_FACTOR)


def desync(fault: Fault) -> None:
    """adds a little noise to one weight, on one rank"""
    weight = local(fault.parameter)
    generator = torch.Generator().manual_seed(fault.options.seed)
    noise = torch.randn(weight.shape, generator=generator).to(weight)
    weight.add_(noise, alpha=NOISE * float(weight.square().mean().sqrt()))


def dead(fault: Fault) -> None:
    """pushes the weights of an MLP to where no unit is ever active"""
    # Inputs of mean 1 meet weights of mean -DEPTH / width: the sum is about -DEPTH.
    bias = fault.parallel.parameters.get(fault.name.removesuffix(UP) + "norm2.bias")
    if bias is not None:
        local(bias).fill_(1.0)
    if fault.parameter is not None:
        local(fault.parameter).sub_(DEPTH / fault.parallel.shards.shapes[fault.name][1])


def straggler(fault: Fault) -> None:
    """delays every forward pass of one rank"""
    time.sleep(fault.options.inject_seconds)


def slow_data(fault: Fault) -> None:
    """delays every batch, as a slow file system does"""
    time.sleep(fault.options.inject_seconds)


def memory_leak(fault: Fault) -> None:
    """keeps 8 MB per step on one rank"""
    fault.leaked.append(torch.ones(LEAK_BYTES, dtype=torch.uint8))


class Kind(NamedTuple):
    """A choice of `--inject`; the docstring of its function is its help."""

    point: str
    """Where in a step it acts: data, batch, forward, gradients (final), weights (updated)."""
    act: Callable[..., object]
    one_rank: bool = False
    """Whether it happens on one rank, by default the last that can have it, or on all."""
    lasts: bool = False
    """Whether it happens from its step on, or in that step only."""

    @property
    def in_parameter(self) -> bool:
        """Whether it is in one parameter, which `--inject-param` chooses."""
        return self.point in ("gradients", "weights")


FAULTS = {
    "frozen": Kind("gradients", frozen, lasts=True),
    "nan": Kind("gradients", nan, one_rank=True),
    "spike": Kind("batch", spike),
    "desync": Kind("weights", desync, one_rank=True),
    "dead": Kind("weights", dead),
    "straggler": Kind("forward", straggler, one_rank=True, lasts=True),
    "slow_data": Kind("data", slow_data, lasts=True),
    "memory_leak": Kind("data", memory_leak, one_rank=True, lasts=True),
}


def plan_fault(options: Options, parallel: Parallelism) -> Fault:
    """Return the fault of `--inject`, checked against who holds what; equal on all ranks."""
    if options.inject is None:
        return Fault(options)
    kind, rank, shards = FAULTS[options.inject], options.inject_rank, parallel.shards
    world, data_rank = len(shards.counts), parallel.sizes.data_rank
    if rank is not None and rank >= world:
        raise BadInput(f"--inject-rank {rank} is out of range; ranks are 0 to {world - 1}")
    if options.inject_param is not None and not kind.in_parameter:
        raise BadInput(f"--inject {options.inject} is in no parameter; leave --inject-param out")
    name = choose_parameter(options, shards) if kind.in_parameter else ""
    holders = shards.holders(name) if name else list(range(world))
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
    if kind.point == "batch" and rank is not None:
        here = data_rank(rank) == data_rank(parallel.ranks.rank)  # they see the same batch
    fault = Fault(options, parallel, name, rank, here)
    if kind.point == "forward":
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
    endings = (UP, "norm1.weight", "")
    likely = next(filter(None, ([n for n in names if n.endswith(end)] for end in endings)))
    return likely[len(likely) // 2]

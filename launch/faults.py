"""Real faults, planted on purpose, to see whether the monitor finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from bad_input import BadInput, nearest
from holdings import Holdings
from torch import nn

if TYPE_CHECKING:
    from arrangement import Arrangement

KINDS = ("frozen", "nan", "spike", "desync", "dead")
UP = "mlp.up.weight"
SPIKE_SCALE = 50.0
NOISE = 0.01  # of the weight's own root mean square
DEPTH = 20.0  # how far below zero the units of a dead layer are; GELU is zero there too


@dataclass(frozen=True)
class FaultRequest:
    """What `--inject` and its companions ask for."""

    kind: str
    at: int
    name: str | None
    target: int | None
    seed: int


@dataclass(frozen=True)
class Fault:
    """One fault in one run. The training loop calls the three methods in every step.

    `frozen`: the parameter's gradient is dropped before every optimizer step, as a misplaced hook
        does. (`requires_grad_(False)` in mid-run would make DDP wait for the gradient for ever.)
    `nan`: one element of its gradient becomes NaN after the backward pass, on one rank.
    `spike`: the step trains on random bytes and its loss is 50 times too large.
    `desync`: its weight gets a little noise after the step, on one rank.
    `dead`: the weights of an MLP are pushed to where no unit of it is ever active, as one far too
        large step does. Its output and all its gradients are zero from then on.

    Where a rank holds a piece of the parameter, the fault is in that piece.
    """

    kind: str
    at: int
    name: str
    parameter: nn.Parameter | None
    """None where this rank holds nothing of it."""
    local: Callable[[torch.Tensor], torch.Tensor]
    """This rank's elements of a parameter or gradient, for in-place use."""
    target: int | None
    """The rank it happens on; None is all of them."""
    here: bool
    """Whether it happens on this rank."""
    seed: int
    norm_bias: nn.Parameter | None = None
    """What is added to every input of the MLP that dies; None where this rank holds nothing."""
    width: int = 1
    """Inputs of that MLP."""

    def describe(self) -> str:
        """One line about what is about to happen."""
        what = "the batch" if self.kind == "spike" else self.name
        where = "all ranks" if self.target is None else f"rank {self.target}"
        when = "from step" if self.kind == "frozen" else "at step"
        return f"injecting {self.kind} into {what} on {where} {when} {self.at}"

    def spoil_batch(
        self, step: int, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The batch to train on and the factor on its loss."""
        if self.kind != "spike" or not self.here or step != self.at:
            return inputs, targets, 1.0
        noise = torch.Generator().manual_seed(self.seed)
        garbage = [torch.randint(0, 256, inputs.shape, generator=noise) for _ in range(2)]
        return garbage[0], garbage[1], SPIKE_SCALE

    def after_backward(self, step: int) -> None:
        """Called with the final gradients, before their norm is taken."""
        if not self.here or self.parameter is None or self.parameter.grad is None:
            return
        if self.kind == "nan" and step == self.at:
            piece = self.local(self.parameter.grad)
            piece[(0,) * piece.ndim] = float("nan")
        elif self.kind == "frozen" and step >= self.at:
            self.parameter.grad = None

    def after_step(self, step: int) -> None:
        """Called when the optimizer has stepped."""
        if step != self.at or not self.here:
            return
        if self.kind == "dead":
            self._push_below_zero()
        elif self.kind == "desync" and self.parameter is not None:
            self._add_noise(self.parameter)

    def _push_below_zero(self) -> None:
        """Inputs of mean 1 meet weights of mean -DEPTH / width: the sum is about -DEPTH."""
        if self.norm_bias is not None:
            self.local(self.norm_bias).fill_(1.0)
        if self.parameter is not None:
            self.local(self.parameter).sub_(DEPTH / self.width)

    def _add_noise(self, parameter: nn.Parameter) -> None:
        piece = self.local(parameter)
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(piece.shape, generator=generator).to(piece)
        piece.add_(noise, alpha=NOISE * float(piece.square().mean().sqrt()))


def plan_fault(request: FaultRequest, arrangement: Arrangement) -> Fault:
    """Check a request against who holds what. All ranks come to the same conclusion."""
    holdings, division = arrangement.holdings, arrangement.conditions.division
    rank, kind, target = arrangement.ranks.rank, request.kind, request.target
    world = len(holdings.places)
    if target is not None and target >= world:
        raise BadInput(f"--inject-rank {target} is out of range; ranks are 0 to {world - 1}")
    name = _choose_parameter(request, holdings, division.mode)
    holders = holdings.holders(name)
    if target is None and kind in ("nan", "desync"):
        target = holders[-1]
    if kind != "spike" and target is not None and target not in holders:
        raise BadInput(
            f"--inject-rank {target} holds nothing of {name} under --parallel {division.mode}; "
            f"rank {holders[-1]} does"
        )
    here = target is None or target == rank
    if kind == "spike" and target is not None:
        # Ranks that work on the same data must stay together.
        here = division.data_rank(target) == division.data_rank(rank)
    parameter, local = arrangement.parameters.get(name), arrangement.local
    fault = Fault(kind, request.at, name, parameter, local, target, here, request.seed)
    if kind == "dead":
        bias = arrangement.parameters.get(name.removesuffix(UP) + "norm2.bias")
        fault = replace(fault, norm_bias=bias, width=holdings.shapes[name][1])
    return fault


def _choose_parameter(request: FaultRequest, holdings: Holdings, mode: str) -> str:
    """The parameter that was asked for, or one in the middle of the model that can have it."""
    name, names = request.name, list(holdings.shapes)
    if name is not None and name not in names:
        raise BadInput(f'--inject-param "{name}" is no parameter{nearest(name, names)}')
    if request.kind == "dead":
        if name is not None and not name.endswith(UP):
            raise BadInput(f"--inject dead needs the {UP} of a block, and {name} is none")
        if request.target is not None:
            raise BadInput("--inject dead happens on all ranks; leave --inject-rank out")
    if request.kind == "desync":
        if len(holdings.places) == 1:
            raise BadInput("--inject desync needs at least 2 ranks; start with torchrun")
        names = [each for each in names if holdings.copies(each) > 1]
        if not names:
            raise BadInput(f"--inject desync needs copies, and --parallel {mode} makes none")
        if name is not None and name not in names:
            raise BadInput(
                f"--inject desync needs copies, and --parallel {mode} makes none of {name}, "
                f"but of {names[len(names) // 2]}"
            )
    if name is not None:
        return name
    for ending in (UP, "norm1.weight"):
        likely = [each for each in names if each.endswith(ending)]
        if likely:
            return likely[len(likely) // 2]
    return names[len(names) // 2]

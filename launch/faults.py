"""Real faults, planted on purpose, to see whether the monitor finds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bad_input import BadInput, nearest
from torch import nn

KINDS = ("frozen", "nan", "spike", "desync")
SPIKE_SCALE = 50.0
NOISE = 0.01  # of the weight's own standard deviation


@dataclass(frozen=True)
class Fault:
    """One fault in one run. The training loop calls the three methods in every step.

    `frozen`: the parameter's gradient is dropped before every optimizer step, as a misplaced hook
        does. (`requires_grad_(False)` in mid-run would make DDP wait for the gradient for ever.)
    `nan`: one element of its gradient becomes NaN after the backward pass, on one rank.
    `spike`: the step trains on random bytes and its loss is 50 times too large.
    `desync`: its weight gets a little noise after the step, on one rank.
    """

    kind: str
    at: int
    name: str
    parameter: nn.Parameter
    target: int | None
    """The rank it happens on; None is all of them."""
    here: bool
    """Whether it happens on this rank."""
    seed: int

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
        if not self.here or self.parameter.grad is None:
            return
        if self.kind == "nan" and step == self.at:
            self.parameter.grad.view(-1)[0] = float("nan")
        elif self.kind == "frozen" and step >= self.at:
            self.parameter.grad = None

    def after_step(self, step: int) -> None:
        """Called when the optimizer has stepped."""
        if self.kind != "desync" or not self.here or step != self.at:
            return
        with torch.no_grad():
            generator = torch.Generator().manual_seed(self.seed)
            noise = torch.randn(self.parameter.shape, generator=generator).to(self.parameter)
            self.parameter.add_(noise, alpha=NOISE * float(self.parameter.std()))


def plan_fault(
    kind: str,
    at: int,
    name: str | None,
    target: int | None,
    model: nn.Module,
    rank: int,
    world: int,
    seed: int,
) -> Fault:
    """Check what `--inject` and its companions ask for. `model` is not wrapped yet."""
    parameters = dict(model.named_parameters())
    if name is None:
        ups = [each for each in parameters if each.endswith("mlp.up.weight")]
        name = ups[len(ups) // 2]
    if name not in parameters:
        raise BadInput(f'--inject-param "{name}" is no parameter{nearest(name, parameters)}')
    if kind == "desync" and world == 1:
        raise BadInput("--inject desync needs at least 2 ranks; start with torchrun")
    if target is None and kind in ("nan", "desync"):
        target = world - 1
    if target is not None and target >= world:
        raise BadInput(f"--inject-rank {target} is out of range; ranks are 0 to {world - 1}")
    return Fault(kind, at, name, parameters[name], target, target is None or target == rank, seed)

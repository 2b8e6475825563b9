"""Planted faults: what a mistake in a trainer, its data or its settings does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.alarms.kinds.setup import Batch, Fault, Setup, seeded

MICRO = 100_000
"""Number of a batch above which it is a later micro-batch of the same step."""


@dataclass
class LrFactor(Fault):
    """The learning rate is multiplied from a step on: a jump, or a rate of 0."""

    at: int
    factor: float

    def lr(self, factor: float, step: int) -> float:
        """Multiply it."""
        return factor * self.factor if step >= self.at else factor


@dataclass
class NoZeroGrad(Fault):
    """`zero_grad` is not called any more."""

    at: int

    def zeroes(self, step: int) -> bool:
        """Stop clearing gradients."""
        return step < self.at


@dataclass
class BackwardTwice(Fault):
    """`backward` runs twice on the same loss."""

    at: int

    def backward(self, loss: torch.Tensor, step: int) -> None:
        """Run it again."""
        if step >= self.at:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]


@dataclass
class Freeze(Fault):
    """`requires_grad` is off for some parameters that the optimizer has."""

    names: str
    at: int = 0

    def begin(self, setup: Setup) -> None:
        """Switch it off before the run."""
        if not self.at:
            self._freeze(setup)

    def before_step(self, setup: Setup, step: int) -> None:
        """Switch it off in the run."""
        if self.at and step == self.at:
            self._freeze(setup)

    def _freeze(self, setup: Setup) -> None:
        for name, parameter in setup.named_parameters():
            if fnmatchcase(name, self.names):
                parameter.requires_grad_(False)


@dataclass
class LeftOut(Fault):
    """Some parameters are not in the optimizer."""

    names: str

    def begin(self, setup: Setup) -> None:
        """Take them out."""
        out = {id(p) for n, p in setup.named_parameters() if fnmatchcase(n, self.names)}
        for optimizer in setup.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in out]


@dataclass
class ZeroGradient(Fault):
    """The gradient of some parameters is lost between backward and step."""

    names: str
    at: int

    def gradients(self, setup: Setup, step: int) -> None:
        """Drop it."""
        if step >= self.at:
            for name, parameter in setup.named_parameters():
                if fnmatchcase(name, self.names):
                    parameter.grad = None


@dataclass
class Reset(Fault):
    """A layer is initialized again in the run."""

    names: str
    at: int

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Draw its weights anew."""
        if step == self.at:
            for name, parameter in setup.named_parameters():
                if fnmatchcase(name, self.names):
                    if parameter.ndim > 1:
                        nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                    else:
                        parameter.zero_()


@dataclass
class Decay(Fault):
    """Weight decay of far too large a factor."""

    decay: float

    def begin(self, setup: Setup) -> None:
        """Set it."""
        for optimizer in setup.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] = self.decay


@dataclass
class EvalMode(Fault):
    """`train()` is not called after an evaluation."""

    at: int

    def before_step(self, setup: Setup, step: int) -> None:
        """Leave the model in eval mode."""
        if step >= self.at:
            for model in setup.models:
                model.eval()


@dataclass
class SameBatch(Fault):
    """The data loader returns the same batch again and again."""

    at: int

    def data(self, setup: Setup, step: int) -> Batch:
        """Return the batch of one step."""
        return setup.batch(min(step % MICRO, self.at))


@dataclass
class SameOnRanks(Fault):
    """All ranks read the data of rank 0."""

    def begin(self, setup: Setup) -> None:
        """Broadcast the batches."""
        own = setup.batch

        def batch(step: int) -> Batch:
            given = own(step)
            for part in given:
                dist.broadcast(part, 0)
            return given

        setup.batch = batch


@dataclass
class GarbageOnRank(Fault):
    """One rank reads noise with random targets."""

    at: int
    rank: int = 1
    scale: float = 10.0

    def data(self, setup: Setup, step: int) -> Batch:
        """Spoil the batch of that rank."""
        x, y = setup.batch(step)
        if dist.get_rank() != self.rank or step % MICRO < self.at:
            return x, y
        at = seeded(step, 77)
        y = y[torch.randperm(len(y), generator=at)]
        return self.scale * torch.randn(x.shape, generator=at), y


@dataclass
class Garbage(Fault):
    """The inputs of some steps are noise, or the targets no longer belong to them."""

    at: int
    until: int = 10**9
    scale: float = 30.0
    shuffle: bool = False

    def data(self, setup: Setup, step: int) -> Batch:
        """Spoil a batch."""
        given = setup.batch(step)
        if not self.at <= step % MICRO <= self.until:
            return given
        at = seeded(step, 78)
        if torch.is_tensor(given):
            if given.is_floating_point():
                return self.scale * torch.randn(given.shape, generator=at)
            return given.flatten()[torch.randperm(given.numel(), generator=at)].view(given.shape)
        parts = [*given]
        if self.shuffle:
            parts[-1] = parts[-1][torch.randperm(len(parts[-1]), generator=at)]
        else:
            parts[0] = self.scale * torch.randn(parts[0].shape, generator=at)
        return tuple(parts)


@dataclass
class RowsExplode(Fault):
    """Some rows of a table grow without bound, as rows do that get a gradient in every step."""

    name: str
    at: int
    rows: int = 2
    factor: float = 1.15

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Let them grow."""
        if self.at <= step < self.at + 40:
            setup.parameter(self.name)[: self.rows] *= self.factor


@dataclass
class WrongNorm(Fault):
    """The norm that is reported and clipped with is not that of the gradients."""

    factor: float
    at: int = 0
    by_rank: bool = False

    def norm(self, norm: torch.Tensor, step: int) -> torch.Tensor:
        """Return another one."""
        if step < self.at:
            return norm
        if self.by_rank:
            return norm * (self.factor if dist.get_rank() else math.sqrt(1 - self.factor**2))
        return norm * self.factor


@dataclass
class Nan(Fault):
    """One NaN in one gradient or weight."""

    name: str
    at: int
    weight: bool = False

    @torch.no_grad()
    def gradients(self, setup: Setup, step: int) -> None:
        """Plant it."""
        if step == self.at:
            parameter = setup.parameter(self.name)
            target = parameter if self.weight else parameter.grad
            assert target is not None
            target.view(-1)[0] = math.nan


@dataclass
class Multiply(Fault):
    """The weights of a layer start, or are set, to a multiple."""

    names: str
    factor: float
    at: int = 0

    @torch.no_grad()
    def begin(self, setup: Setup) -> None:
        """Multiply before the run."""
        if not self.at:
            self._apply(setup)

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Multiply in the run."""
        if self.at and step == self.at:
            self._apply(setup)

    def _apply(self, setup: Setup) -> None:
        for name, parameter in setup.named_parameters():
            if fnmatchcase(name, self.names):
                parameter.mul_(self.factor)


@dataclass
class Dead(Fault):
    """The units of a layer die: its bias becomes very negative."""

    name: str
    at: int

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Let them die."""
        if step == self.at:
            setup.parameter(self.name).fill_(-50.0)


@dataclass
class Desync(Fault):
    """The weights of one rank drift away."""

    at: int

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Add noise on rank 1."""
        if step == self.at and dist.get_rank() == 1:
            for _, parameter in setup.named_parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter))


@dataclass
class Unit(Fault):
    """The targets come in another unit from a step on."""

    at: int
    factor: float = 100.0

    def data(self, setup: Setup, step: int) -> Batch:
        """Multiply the last part of a batch."""
        *parts, target = setup.batch(step)
        return (*parts, target * self.factor if step % MICRO >= self.at else target)


@dataclass
class WrongSign(Fault):
    """The loss has the wrong sign: it is maximized."""

    def begin(self, setup: Setup) -> None:
        """Turn it around."""
        own = setup.loss
        setup.loss = lambda given: -own(given)


@dataclass
class SoftmaxTwice(Fault):
    """The model returns probabilities to a loss that expects logits."""

    def begin(self, setup: Setup) -> None:
        """Apply softmax to the output."""
        setup.models[0].register_forward_hook(lambda _, __, out: out.softmax(-1))


@dataclass
class DeadFromStart(Fault):
    """All units of the named layers are dead from the start."""

    names: str

    @torch.no_grad()
    def begin(self, setup: Setup) -> None:
        """Make their biases very negative."""
        for name, parameter in setup.named_parameters():
            if fnmatchcase(name, self.names):
                parameter.fill_(-30.0)


@dataclass
class ShuffledOnRank(Fault):
    """The labels of one rank no longer belong to its inputs."""

    at: int = 1
    rank: int = 1

    def data(self, setup: Setup, step: int) -> Batch:
        """Shuffle them."""
        x, y = setup.batch(step)
        if dist.get_rank() != self.rank or step % MICRO < self.at:
            return x, y
        return x, y[torch.randperm(len(y), generator=seeded(step, 79))]


@dataclass
class OneElement(Fault):
    """One element of a weight changes on rank 1, as by a flipped bit."""

    name: str
    at: int
    change: float = 1.0

    @torch.no_grad()
    def before_step(self, setup: Setup, step: int) -> None:
        """Change it."""
        if step == self.at and dist.get_rank() == 1:
            setup.parameter(self.name).view(-1)[7] += self.change


@dataclass
class Unscaled(Fault):
    """Inputs as bytes: from 0 to `top`, without a mean or a unit."""

    top: float = 255.0

    def data(self, setup: Setup, step: int) -> Batch:
        """Scale and shift the inputs."""
        x, y = setup.batch(step)
        return ((x + 3) / 6).clamp(0, 1) * self.top, y


@dataclass
class SignFlips(Fault):
    """From a step on what is minimized is the negative; the loss that is reported is not."""

    at: int

    def backward(self, loss: torch.Tensor, step: int) -> None:
        """Go uphill."""
        (-loss if step >= self.at else loss).backward()  # type: ignore[no-untyped-call]


@dataclass
class LossFlips(Fault):
    """From a step on the loss has the other sign, for the optimizer and in the log."""

    at: int

    def begin(self, setup: Setup) -> None:
        """Turn it around from that step on."""
        own = setup.loss
        self.now = 0
        setup.loss = lambda given: -own(given) if self.now >= self.at else own(given)

    def before_step(self, setup: Setup, step: int) -> None:  # noqa: ARG002
        """Count."""
        self.now = step

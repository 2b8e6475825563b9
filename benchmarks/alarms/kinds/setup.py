"""What a kind of training consists of, and the loop that trains it with planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Batch = Any
Schedule = Callable[[int], float]
"""Factor of the learning rate at a step."""


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator that depends on all the numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 7) % (1 << 31)
    return torch.Generator().manual_seed(seed)


@dataclass
class Setup:
    """A model with its data, its loss and its optimizer."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    batch: Callable[[int], Batch] = lambda _: None
    """The batch of a step; of micro-batch i of step s it is called with s + i * 100000."""
    loss: Callable[[Batch], torch.Tensor] = lambda _: torch.zeros(())
    schedule: Schedule = lambda _: 1.0
    clip: float | None = 1.0
    accumulate: int = 1
    validate: Callable[[], float] | None = None
    evaluate_every: int = 0
    tasks: Callable[[Batch], Mapping[str, torch.Tensor]] | None = None
    one_step: Callable[[Loop, int], torch.Tensor] | None = None
    """Replaces the step of the loop, for kinds with several optimizers or closures."""
    after_step: Callable[[int], None] = lambda _: None
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the monitor in addition to those of every run."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters under the names that the monitor uses."""
        for model in self.models:
            inner = model.module if hasattr(model, "module") else model
            yield from inner.named_parameters()

    def parameter(self, name: str) -> nn.Parameter:
        """Return one parameter."""
        return dict(self.named_parameters())[name]


class Fault:
    """Does nothing; a planted fault overrides what it spoils. Steps count from 1."""

    def begin(self, setup: Setup) -> None:
        """Change the setup before the monitor is attached."""

    def data(self, setup: Setup, step: int) -> Batch:
        """Return the batch of a step."""
        return setup.batch(step)

    def before_step(self, setup: Setup, step: int) -> None:
        """Run at the beginning of a step."""

    def zeroes(self, step: int) -> bool:  # noqa: ARG002
        """Return whether gradients are cleared in this step."""
        return True

    def backward(self, loss: torch.Tensor, step: int) -> None:  # noqa: ARG002
        """Run the backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, setup: Setup, step: int) -> None:
        """Change the gradients between backward and step."""

    def norm(self, norm: torch.Tensor, step: int) -> torch.Tensor:  # noqa: ARG002
        """Return the gradient norm that the trainer reports and clips with."""
        return norm

    def lr(self, factor: float, step: int) -> float:  # noqa: ARG002
        """Return the factor of the learning rate."""
        return factor


class Loop:
    """Trains a setup; `monitor` gets what a trainer would report."""

    def __init__(self, setup: Setup, fault: Fault, monitor: Any) -> None:
        self.setup, self.fault, self.monitor = setup, fault, monitor
        self._rates = [[g["lr"] for g in o.param_groups] for o in setup.optimizers]
        self.step_number = 0

    def run(self, steps: int) -> None:
        """Train from step 1 to `steps`."""
        for step in range(1, steps + 1):
            self.step_number = step
            factor = self.fault.lr(self.setup.schedule(step), step)
            for optimizer, rates in zip(self.setup.optimizers, self._rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
            self.fault.before_step(self.setup, step)
            loss = (self.setup.one_step or _ordinary_step)(self, step)
            self.monitor.step(loss=loss.detach())
            self.setup.after_step(step)
            every = self.setup.evaluate_every
            if every and self.setup.validate and step % every == 0:
                self.monitor.evaluated(val_loss=self.setup.validate())

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear gradients, unless the fault forgets it."""
        if self.fault.zeroes(self.step_number):
            optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass as the fault has it."""
        self.fault.backward(loss, self.step_number)

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, report the norm, and step."""
        step = self.step_number
        self.fault.gradients(self.setup, step)
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if self.setup.clip is not None and parameters:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            norm = self.fault.norm(norm, step)
            self.monitor.check(grad_norm=norm)
            torch.nn.utils.clip_grads_with_norm_(parameters, self.setup.clip, norm)
        optimizer.step()


def _ordinary_step(loop: Loop, step: int) -> torch.Tensor:
    setup = loop.setup
    for optimizer in setup.optimizers:
        loop.zero_grad(optimizer)
    total = torch.zeros(())
    for micro in range(setup.accumulate):
        batch = loop.fault.data(setup, step + 100_000 * micro)
        if setup.tasks is not None:
            tasks = setup.tasks(batch)
            loop.monitor.task_losses(tasks)
            loss = torch.stack([*tasks.values()]).sum()
        else:
            loss = setup.loss(batch)
        loop.backward(loss / setup.accumulate)
        total = total + loss.detach() / setup.accumulate
    for optimizer in setup.optimizers:
        loop.apply(optimizer)
    return total


def constant(_: int) -> float:
    """Keep the learning rate."""
    return 1.0


def warmup_cosine(steps: int, warmup: int = 20, floor: float = 0.0) -> Schedule:
    """Rise over `warmup` steps, then fall along a cosine to `floor`."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        share = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2

    return factor


def warmup_stable_decay(steps: int, warmup: int = 20, decay: float = 0.3) -> Schedule:
    """Rise, stay, and fall to 0 in the last `decay` of the run."""

    def factor(step: int) -> float:
        return min(1.0, step / warmup, max(0.0, (steps - step) / (decay * steps)))

    return factor


def restarts(period: int) -> Schedule:
    """Fall along a cosine and start again at the full rate every `period` steps."""
    return lambda step: 0.05 + 0.95 * (1 + math.cos(math.pi * ((step - 1) % period) / period)) / 2


def staircase(period: int, factor: float = 0.1) -> Schedule:
    """Multiply the rate by `factor` every `period` steps."""
    return lambda step: factor ** ((step - 1) // period)


class Lion(torch.optim.Optimizer):
    """Sign of the interpolated momentum (Chen et al., 2023)."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                direction = (0.9 * momentum + 0.1 * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class Orthogonal(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by Newton-Schulz iterations, as in Muon."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all matrices."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                x = (p.grad + group["momentum"] * momentum).reshape(len(p), -1)
                x = x / (x.norm() + 1e-7)
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if tall else x
                scale = max(1.0, p.shape[0] / x.shape[1]) ** 0.5
                p.add_(x.reshape(p.shape), alpha=-group["lr"] * scale)


def optimizer_of(
    name: str, parameters: Sequence[nn.Parameter] | Any, lr: float, decay: float = 0.01
) -> torch.optim.Optimizer:
    """Return an optimizer by its name."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr)
    if name == "lion":
        return Lion(parameters, lr)
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr)
    return torch.optim.AdamW(parameters, lr, weight_decay=decay)

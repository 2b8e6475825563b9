"""The common parts of the blind set: an ordinary setup, and optimizers that torch has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of


def plain(
    net: nn.Module,
    batch: Callable[[int], Batch],
    loss: Callable[[Batch], torch.Tensor],
    *,
    optimizer: str = "adamw",
    lr: float = 3e-3,
    decay: float = 0.01,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    **further: Any,
) -> Setup:
    """Return one model with one optimizer; `further` are fields of the setup."""
    held = [p for p in net.parameters() if p.requires_grad]
    if "evaluate_every" in further and "validate" not in further:
        further["validate"] = _validation(net, batch, loss)
    return Setup(
        [net],
        [make_optimizer(optimizer, held, lr, decay)],
        batch,
        loss,
        schedule,
        clip,
        **further,
    )


def _validation(
    net: nn.Module, batch: Callable[[int], Batch], loss: Callable[[Batch], torch.Tensor]
) -> Callable[[], float]:
    """Return a function that gives the loss on batches which training never has."""

    @torch.no_grad()
    def validate() -> float:
        was = net.training
        net.eval()
        value = sum(loss(batch(-1 - i)).item() for i in range(4)) / 4
        net.train(was)
        return value

    return validate


def make_optimizer(name: str, held: Any, lr: float, decay: float = 0.01) -> torch.optim.Optimizer:
    """Return an optimizer by its name."""
    own = {
        "sign": SignSgd,
        "lamb": Lamb,
        "kronecker": Kronecker,
        "schedule-free": ScheduleFree,
        "langevin": Langevin,
    }
    if name in own:
        return own[name](held, lr)
    if name == "nesterov":
        return torch.optim.SGD(held, lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    if name == "plain-sgd":
        return torch.optim.SGD(held, lr)
    if name == "nadam":
        return torch.optim.NAdam(held, lr)
    if name == "radam":
        return torch.optim.RAdam(held, lr)
    if name == "adamax":
        return torch.optim.Adamax(held, lr)
    if name == "adadelta":
        return torch.optim.Adadelta(held, lr)
    if name == "rprop":
        return torch.optim.Rprop(held, lr)
    return optimizer_of(name, held, lr, decay)


class Own(torch.optim.Optimizer):
    """Applies `change` to each parameter that has a gradient."""

    def __init__(self, held: Any, lr: float) -> None:
        super().__init__(held, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    self.change(p, p.grad, state, group["lr"])

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        raise NotImplementedError


class SignSgd(Own):
    """The sign of the gradient."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Step by the sign."""
        del state
        p.add_(grad.sign(), alpha=-lr)


class Langevin(Own):
    """Gradient steps with noise, as for sampling."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Step and add noise."""
        del state
        p.add_(grad, alpha=-lr).add_(torch.randn_like(p), alpha=1e-2 * lr**0.5)


class Lamb(Own):
    """Adam with a trust ratio by layer (You et al., 2020)."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Step by the weight's own norm."""
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(grad, 0.1)
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(grad**2, 0.001)
        t = state["step"]
        move = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * p
        trust = p.norm() / move.norm() if p.norm() > 0 and move.norm() > 0 else 1.0
        p.add_(move * trust, alpha=-lr)


class Kronecker(Own):
    """Shampoo-like: gradients multiplied by inverse roots of their row and column products."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Step along the preconditioned gradient, at the size of the gradient's sign."""
        g = grad.reshape(len(p), -1) if p.ndim > 1 else grad[:, None]
        left = state.setdefault("l", torch.zeros(len(g), len(g))).lerp_(g @ g.T, 0.05)
        right = state.setdefault("r", torch.zeros(g.shape[1], g.shape[1])).lerp_(g.T @ g, 0.05)
        if state["step"] % 10 == 1:
            state["il"], state["ir"] = _root(left), _root(right)
        move = state["il"] @ g @ state["ir"]
        move = move * (move.numel() ** 0.5 / (move.norm() + 1e-12))
        state["m"] = state.get("m", torch.zeros_like(move)).lerp_(move, 0.1)
        p.add_(state["m"].reshape(p.shape), alpha=-lr)


def _root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(1e-6 * float(values.max()) + 1e-30)
    return (vectors * values**-0.25) @ vectors.T


class ScheduleFree(Own):
    """Gradients at an interpolation between the average and the iterate (Defazio et al., 2024)."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Move the iterate and the average, and leave the point between them in `p`."""
        z = state.setdefault("z", p.clone())
        x = state.setdefault("x", p.clone())
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(grad**2, 0.01)
        t = state["step"]
        z.sub_(grad / ((v / (1 - 0.99**t)).sqrt() + 1e-8), alpha=lr)
        x.lerp_(z, 1 / t)
        p.copy_(z.lerp(x, 0.9))

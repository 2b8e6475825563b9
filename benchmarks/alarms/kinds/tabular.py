"""Tables: regression of any scale, recommender, multi-task, grokking, deep plain networks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import (
    Batch,
    Loop,
    Schedule,
    Setup,
    constant,
    optimizer_of,
    seeded,
)


def regression(
    scale: float = 1.0,
    lr: float = 3e-3,
    optimizer: str = "adamw",
    depth: int = 2,
    width: int = 32,
    activation: str = "gelu",
    full_batch: bool = False,
    noise: float = 0.05,
    schedule: Schedule = constant,
    clip: float | None = None,
    examples: int = 0,
    evaluate_every: int = 0,
    decay: float = 0.01,
    accumulate: int = 1,
    harder_at: int = 0,
    seed: int = 0,
) -> Setup:
    """Fit a function; `scale` multiplies the loss, `harder_at` is a change of the data."""
    torch.manual_seed(seed)
    kinds = {"gelu": nn.GELU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
    net = mlp(8, *[width] * depth, 1, activation=kinds[activation])

    def made(step: int, size: int = 64) -> Batch:
        at = seeded(seed, 0 if full_batch else step % examples if examples else step)
        x = torch.randn(size, 8, generator=at)
        if harder_at and step >= harder_at:
            x = 2 * x
        y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].tanh()
        return x, y + noise * torch.randn(size, 1, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        return scale * F.mse_loss(net(given[0]), given[1])

    @torch.no_grad()
    def validate() -> float:
        at = seeded(seed, 10**6)
        x = torch.randn(256, 8, generator=at)
        return loss((x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].tanh())).item()

    if optimizer == "lbfgs":
        return _lbfgs(net, made, loss, lr)
    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr, decay)],
        made,
        loss,
        schedule,
        clip,
        accumulate,
        validate,
        evaluate_every,
        config={"loss": {"expected_to_fall": False}} if harder_at else {},
    )


def _lbfgs(net: nn.Module, batch: object, loss: object, lr: float) -> Setup:
    optimizer = torch.optim.LBFGS(net.parameters(), lr, max_iter=4, history_size=8)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        given = loop.fault.data(loop.setup, step)

        def closure() -> torch.Tensor:
            loop.zero_grad(optimizer)
            value = loop.setup.loss(given)
            loop.backward(value)
            return value

        result: torch.Tensor = optimizer.step(closure)  # type: ignore[assignment]
        return result

    return Setup([net], [optimizer], batch, loss, clip=None, one_step=one_step)  # type: ignore


class Recommender(nn.Module):
    """Embeddings of users and items, and a small network on both."""

    def __init__(self, users: int = 400, items: int = 200, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.top = mlp(2 * width, 32, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the logit of a click."""
        u, i = self.users(users), self.items(items)
        return self.top(torch.cat([u, i], -1))[:, 0] + (u * i).sum(-1)


def recommender(
    lr: float = 3e-3,
    optimizer: str = "adamw",
    schedule: Schedule = constant,
    clip: float | None = None,
    decay: float = 0.01,
    seed: int = 0,
) -> Setup:
    """Predict clicks; few items are seen often, most of them rarely."""
    torch.manual_seed(seed)
    net = Recommender()
    taste = torch.randn(600, 4, generator=seeded(3))

    def batch(step: int) -> Batch:
        at = seeded(seed, step)
        users = torch.randint(0, 400, (128,), generator=at)
        items = (200 * torch.rand(128, generator=at) ** 3).long()
        likes = (taste[users] * taste[400 + items]).sum(-1)
        return users, items, (likes + torch.randn(128, generator=at) > 0).float()

    def loss(given: Batch) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(net(given[0], given[1]), given[2])

    return Setup(
        [net], [optimizer_of(optimizer, net.parameters(), lr, decay)], batch, loss, schedule, clip
    )


class Shared(nn.Module):
    """One body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 48, 48)
        self.first, self.second = nn.Linear(48, 1), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of both heads."""
        x = F.gelu(self.body(x))
        return self.first(x), self.second(x)


def multitask(
    weight: float = 0.5, lr: float = 3e-3, schedule: Schedule = constant, seed: int = 0
) -> Setup:
    """Regression and classification together; `weight` of the second loss."""
    torch.manual_seed(seed)
    net = Shared()

    def batch(step: int) -> Batch:
        x = torch.randn(64, 8, generator=seeded(seed, step))
        return x, x[:, :1] * x[:, 1:2], (x[:, 2] > 0).long() + 2 * (x[:, 3] > 0).long()

    def tasks(given: Batch) -> dict[str, torch.Tensor]:
        a, b = net(given[0])
        return {
            "value": F.mse_loss(a, given[1]),
            "class": weight * F.cross_entropy(b, given[2]),
        }

    return Setup(
        [net],
        [optimizer_of("adamw", net.parameters(), lr)],
        batch,
        schedule=schedule,
        tasks=tasks,
        config={"task_interval": 5},
    )


def grokking(
    lr: float = 3e-3,
    decay: float = 0.1,
    optimizer: str = "adamw",
    evaluate_every: int = 0,
    schedule: Schedule = constant,
    seed: int = 0,
) -> Setup:
    """Addition modulo 23, the same 200 pairs in every step."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(23, 16), nn.Flatten(), *mlp(32, 64, 23))
    pairs = torch.cartesian_prod(torch.arange(23), torch.arange(23))
    pairs = pairs[torch.randperm(len(pairs), generator=seeded(seed))]

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given), given.sum(1) % 23)

    @torch.no_grad()
    def validate() -> float:
        return loss(pairs[400:]).item()

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr, decay)],
        lambda _: pairs[:400],
        loss,
        schedule,
        None,
        validate=validate,
        evaluate_every=evaluate_every,
    )

"""Further kinds for the tuning half: alternating, mixture density, forecasting, graphs and more."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import Named, mlp
from benchmarks.alarms.kinds.setup import (
    Batch,
    Loop,
    Schedule,
    Setup,
    constant,
    optimizer_of,
    seeded,
)
from benchmarks.alarms.kinds.vision import images


def alternating(lr: float = 3e-3, optimizer: str = "adamw", seed: int = 0) -> Setup:
    """Fit two networks to each other's residual, one after the other in each step."""
    torch.manual_seed(seed)
    first, second = Named("first", mlp(8, 24, 1)), Named("second", mlp(8, 24, 1))
    o1 = optimizer_of(optimizer, first.parameters(), lr)
    o2 = optimizer_of(optimizer, second.parameters(), lr)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x = torch.randn(64, 8, generator=seeded(seed, step))
        y = x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()
        loop.zero_grad(o1)
        loss1 = F.mse_loss(first(x), y - second(x).detach())
        loop.backward(loss1)
        loop.apply(o1)
        loop.zero_grad(o2)
        loss2 = F.mse_loss(second(x), y - first(x).detach())
        loop.backward(loss2)
        loop.apply(o2)
        return loss1 - 0.5 * loss2

    return Setup([first, second], [o1, o2], one_step=one_step, clip=None)


def mixture_density(
    lr: float = 3e-3, optimizer: str = "adamw", schedule: Schedule = constant, seed: int = 0
) -> Setup:
    """A negative log likelihood of narrow modes, which falls below zero."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 32, 9)

    def batch(step: int) -> Batch:
        at = seeded(seed, step)
        x = torch.randn(128, 2, generator=at)
        side = torch.randint(0, 2, (128, 1), generator=at) * 2 - 1
        return x, side * x[:, :1].tanh() + 0.02 * torch.randn(128, 1, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        weight, mean, log_std = net(given[0]).chunk(3, -1)
        log_std = log_std.clamp(-4, 2)
        each = -0.5 * ((given[1] - mean) / log_std.exp()) ** 2 - log_std
        return -torch.logsumexp(each + weight.log_softmax(-1), -1).mean()

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss, schedule, 1.0)


def forecast(
    lr: float = 3e-3, optimizer: str = "adamw", schedule: Schedule = constant, seed: int = 0
) -> Setup:
    """Dilated convolutions with weight decay on sums of sines; heavy-tailed noise."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv1d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv1d(16, 16, 3, padding=2, dilation=2),
        nn.GELU(),
        nn.Conv1d(16, 16, 3, padding=4, dilation=4),
        nn.GELU(),
        nn.Conv1d(16, 1, 1),
    )

    def batch(step: int) -> Batch:
        at = seeded(seed, step)
        t = torch.arange(33) / 4 + 6 * torch.rand(32, 1, generator=at)
        x = t.sin() + 0.5 * (2.3 * t).sin()
        noise = torch.randn(x.shape, generator=at)
        x = x + 0.1 * noise / torch.rand(x.shape, generator=at).clamp_min(0.05)
        return x[:, None, :-1], x[:, None, 1:]

    def loss(given: Batch) -> torch.Tensor:
        return F.l1_loss(net(given[0]), given[1])

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss, schedule)


def triplet(
    lr: float = 1e-3, optimizer: str = "adamw", margin: float = 0.3, seed: int = 0
) -> Setup:
    """A margin loss: it reaches exactly zero in many batches."""
    torch.manual_seed(seed)
    net = mlp(64, 48, 16)

    def batch(step: int) -> Batch:
        x, y = images(step, seed, 48)
        return x.flatten(1), y

    def loss(given: Batch) -> torch.Tensor:
        z, y = F.normalize(net(given[0]), dim=-1), given[1]
        apart = torch.cdist(z, z)
        same = (y[:, None] == y).float()
        worst = (apart * same).max(1).values - (apart + 9 * same).min(1).values
        return F.relu(worst + margin).mean()

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss)


def graph(
    lr: float = 5e-3, optimizer: str = "adamw", full_batch: bool = True, seed: int = 0
) -> Setup:
    """Message passing on one graph, the same in every step."""
    torch.manual_seed(seed)
    at = seeded(4)
    links = (torch.rand(120, 120, generator=at) < 0.05).float()
    links = (links + links.T + torch.eye(120)).clamp(max=1)
    links = links / links.sum(1, keepdim=True)
    nodes = torch.randn(120, 12, generator=at)
    labels = (links @ links @ nodes)[:, :4].argmax(1)
    layers = nn.ModuleList([nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 4)])

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in layers[:-1]:
                x = self.dropout(F.relu(links @ layer(x)))
            return layers[-1](x)

    net = Graph()

    def batch(step: int) -> Batch:
        some = torch.randperm(120, generator=seeded(seed, step))[:60]
        return nodes, torch.arange(120) if full_batch else some

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0])[given[1]], labels[given[1]])

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss)


class PostNorm(nn.Module):
    """Blocks with the norm after the sum, of which some are skipped at random."""

    def __init__(self, depth: int, skip: float) -> None:
        super().__init__()
        self.skip = skip
        self.enter = nn.Linear(64, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(depth)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(depth)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.enter(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            if self.skip == 0 or torch.rand(()) >= self.skip:
                x = norm(x + block(x))
        return self.head(x)


def stochastic_depth(
    lr: float = 2e-3,
    optimizer: str = "adamw",
    depth: int = 6,
    skip: float = 0.3,
    schedule: Schedule = constant,
    seed: int = 0,
) -> Setup:
    """Blocks are skipped at random, so that a step trains some of them only."""
    torch.manual_seed(seed)
    net = PostNorm(depth, skip)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0].flatten(1)), given[1])

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        lambda step: images(step, seed),
        loss,
        schedule,
    )


def distillation(
    lr: float = 2e-3, optimizer: str = "adamw", temperature: float = 2.0, seed: int = 0
) -> Setup:
    """A student learns the outputs of a fixed teacher: the loss goes to zero."""
    torch.manual_seed(seed)
    teacher, net = mlp(64, 32, 10), mlp(64, 32, 32, 10)

    def loss(x: Batch) -> torch.Tensor:
        with torch.no_grad():
            wanted = (teacher(x) / temperature).softmax(-1)
        return F.kl_div((net(x) / temperature).log_softmax(-1), wanted, reduction="batchmean")

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        lambda step: images(step, seed)[0].flatten(1),
        loss,
    )


def convolutional_autoencoder(
    lr: float = 3e-3, optimizer: str = "adamw", schedule: Schedule = constant, seed: int = 0
) -> Setup:
    """Strided convolutions with BatchNorm, and back."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 4, 2, 1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
    )
    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        lambda step: images(step, seed)[0],
        lambda x: F.mse_loss(net(x), x),
        schedule,
        None,
    )


def closure(lr: float = 3e-3, evaluations: int = 2, seed: int = 0) -> Setup:
    """An optimizer that calls its closure several times in a step, as line searches do."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, 1)
    optimizer = optimizer_of("adamw", net.parameters(), lr)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x = torch.randn(64, 8, generator=seeded(seed, step))
        y = (x[:, :1] * x[:, 1:2]).sin()
        loss = torch.zeros(())
        for i in range(evaluations):
            loop.zero_grad(optimizer)
            noisy = x + 0.01 * i * torch.randn(x.shape, generator=seeded(seed, step, i))
            loss = F.mse_loss(net(noisy), y)
            loop.backward(loss)
        loop.apply(optimizer)
        return loss

    return Setup([net], [optimizer], one_step=one_step, clip=None)


def heavy_tailed(lr: float = 3e-3, optimizer: str = "adamw", seed: int = 0) -> Setup:
    """Regression whose batches differ in difficulty by a factor of ten."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step)
        x = torch.randn(32, 8, generator=at)
        scale = math.exp(0.8 * torch.randn((), generator=at).item())
        return x, scale * (x[:, :1] * x[:, 1:2])

    def loss(given: Batch) -> torch.Tensor:
        return F.mse_loss(net(given[0]), given[1])

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss)

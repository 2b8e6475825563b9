"""Plain networks that a wrong scale of inputs or of the rate spoils in the first steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Setup, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import images


def sigmoids(
    seed: int = 0,
    optimizer: str = "adamw",
    lr: float = 3e-3,
    depth: int = 2,
    width: int = 48,
    activation: type[nn.Module] = nn.Sigmoid,
) -> Setup:
    """Classify images with bounded activations."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), *mlp(64, *[width] * depth, 10, activation=activation))

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    made = optimizer_of(optimizer, net.parameters(), lr)
    return Setup([net], [made], lambda step: images(step, seed), loss)


def bursting(
    seed: int = 0,
    optimizer: str = "sgd",
    lr: float = 0.5,
    width: int = 64,
    depth: int = 2,
    unit: float = 10.0,
    classes: int = 0,
) -> Setup:
    """Fit targets in a large unit, or classes, at a rate that makes the first steps explode."""
    torch.manual_seed(seed)
    net = mlp(8, *[width] * depth, classes or 1, activation=nn.ReLU)

    def batch(step: int) -> Batch:
        x = torch.randn(64, 8, generator=seeded(seed, step, 51))
        return x, unit * ((x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3])

    def loss(given: Batch) -> torch.Tensor:
        if classes:
            return F.cross_entropy(net(given[0]), (given[0][:, :classes]).argmax(1))
        return F.mse_loss(net(given[0]), given[1])

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss)

"""Healthy runs whose loss rises, jumps or stays although the model learns what it is meant to."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import convolutional, images


def latent_codes(
    seed: int = 0,
    lr: float = 1e-3,
    optimizer: str = "adamw",
    pull: float = 0.25,
    unit: float = 1.0,
    codes: int = 16,
    slow: float = 1.0,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
) -> Setup:
    """Reconstruct through codes that are looked up: distances to them grow with the latents."""
    torch.manual_seed(seed)
    encoder, decoder = mlp(64, 64, 8), mlp(8, 64, 64)
    book = nn.Embedding(codes, 8)
    nn.init.uniform_(book.weight, -1 / codes, 1 / codes)
    net = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "book": book})

    def loss(given: Batch) -> torch.Tensor:
        x = unit * given[0].flatten(1)
        z = encoder(x)
        q = book(torch.cdist(z, book.weight).argmin(1))
        terms = (q - z.detach()).square().sum(1) + pull * (z - q.detach()).square().sum(1)
        back = decoder(z + (q - z).detach())
        return (back - x).square().sum(1).mean() / 64 + terms.mean()

    return Setup(
        [net],
        [
            optimizer_of(
                optimizer,
                [
                    {"params": [*encoder.parameters(), *decoder.parameters()], "lr": lr},
                    {"params": [*book.parameters()], "lr": slow * lr},
                ],
                lr,
            )
        ],
        lambda step: images(step, seed),
        loss,
        schedule,
        clip,
    )


def growing_returns(
    seed: int = 0, lr: float = 3e-3, growth: float = 0.02, clip: float | None = 1.0
) -> Setup:
    """Estimate values of a policy that gets better: their squared error grows with the returns."""
    torch.manual_seed(seed)
    net = mlp(8, 48, 48, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 31)
        x = torch.randn(64, 8, generator=at)
        better = 0.3 + growth * (step % 100_000)
        value = better * (1 + x[:, :1].tanh() * x[:, 1:2])
        return x, value + 0.5 * better * torch.randn(64, 1, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        return F.mse_loss(net(given[0]), given[1])

    return Setup([net], [optimizer_of("adamw", net.parameters(), lr)], batch, loss, clip=clip)


def filling_queue(seed: int = 0, lr: float = 2e-3, fill: int = 120, most: int = 512) -> Setup:
    """Tell pairs from a queue of negatives that fills up: the loss grows with its length."""
    torch.manual_seed(seed)
    net = mlp(16, 32, 16)
    mix = torch.randn(16, 16, generator=seeded(seed, 32))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 33)
        x = torch.randn(32, 16, generator=at)
        others = max(2, most * min(step % 100_000, fill) // fill)
        return x, x @ mix + torch.randn(32, 16, generator=at), torch.randn(others, 16, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        a, b, others = (F.normalize(net(each), dim=1) for each in given)
        logits = torch.cat([(a * b).sum(1, keepdim=True), a @ others.T], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(32, dtype=torch.long))

    return Setup([net], [optimizer_of("adamw", net.parameters(), lr)], batch, loss, clip=1.0)


def task_switches(
    seed: int = 0, period: int = 100, optimizer: str = "adamw", lr: float = 2e-3, tasks: int = 4
) -> Setup:
    """Learn one task after the other: at each switch the loss begins anew."""
    torch.manual_seed(seed)
    net = convolutional(8)

    def batch(step: int) -> Batch:
        x, y = images(step, seed)
        task = min(tasks - 1, (step % 100_000 - 1) // period)
        order = torch.randperm(64, generator=seeded(34, task))
        return x.flatten(1)[:, order].view_as(x), (y + 3 * task) % 10

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, loss)


def harder_views(seed: int = 0, lr: float = 2e-3, until: int = 250, most: float = 4.0) -> Setup:
    """Classify images under noise that is raised over the run, as a curriculum does."""
    torch.manual_seed(seed)
    net = convolutional(8)

    def batch(step: int) -> Batch:
        x, y = images(step, seed)
        noise = most * min(1.0, (step % 100_000) / until)
        return x + noise * torch.randn(x.shape, generator=seeded(seed, step, 35)), y

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    return Setup([net], [optimizer_of("adamw", net.parameters(), lr)], batch, loss)


def longer_rollouts(seed: int = 0, lr: float = 2e-3, period: int = 60) -> Setup:
    """Predict a trajectory from its start, over more and more steps: errors accumulate."""
    torch.manual_seed(seed)
    net = mlp(4, 32, 4, activation=nn.Tanh)
    turn = torch.tensor([[0.9, 0.4], [-0.4, 0.9]])

    def batch(step: int) -> Batch:
        x = [torch.randn(32, 4, generator=seeded(seed, step, 36))]
        for _ in range(2 + (step % 100_000) // period * 2):
            now = torch.cat([x[-1][:, :2] @ turn, (x[-1][:, 2:] + x[-1][:, :2]).sin()], 1)
            x.append(now)
        return (torch.stack(x),)

    def loss(given: Batch) -> torch.Tensor:
        state, total = given[0][0], torch.zeros(())
        for target in given[0][1:]:
            state = state + net(state)
            total = total + F.mse_loss(state, target)
        return total

    return Setup([net], [optimizer_of("adamw", net.parameters(), lr)], batch, loss, clip=1.0)


def confusion(seed: int = 0, lr: float = 2e-3, most: float = 1.0, steps: int = 300) -> Setup:
    """Learn features that do not tell two domains apart: a reversed gradient that is ramped up."""
    torch.manual_seed(seed)
    features, head, domain = mlp(12, 32, 16), mlp(16, 16, 5), mlp(16, 16, 2)
    net = nn.ModuleDict({"features": features, "head": head, "domain": domain})
    labels = torch.randn(12, 5, generator=seeded(seed, 37))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 38)
        x, other = torch.randn(64, 12, generator=at), torch.randint(0, 2, (64,), generator=at)
        share = step % 100_000 / steps
        return (
            x + 0.7 * other[:, None],
            (x @ labels).argmax(1),
            other,
            2 / (1 + math.exp(-10 * share)) - 1,
        )

    def loss(given: Batch) -> torch.Tensor:
        x, y, other, weight = given
        z = features(x)
        reversed_z = z.detach() * (1 + most * weight) - most * weight * z
        return F.cross_entropy(head(z), y) + F.cross_entropy(domain(reversed_z), other)

    return Setup([net], [optimizer_of("adamw", net.parameters(), lr)], batch, loss, clip=1.0)

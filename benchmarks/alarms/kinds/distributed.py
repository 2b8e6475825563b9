"""Data-parallel training on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import convolutional, images


def data_parallel(
    model: str = "mlp",
    lr: float = 3e-3,
    optimizer: str = "adamw",
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    accumulate: int = 1,
    seed: int = 0,
) -> Setup:
    """Train a replica on each rank, on data of its own."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(
        convolutional(8) if model == "cnn" else mlp(8, 32, 32, 1)
    )

    def batch(step: int) -> Batch:
        if model == "cnn":
            return images(step, seed + 1000 * rank)
        x = torch.randn(64, 8, generator=seeded(seed, step, rank))
        return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].tanh()

    def loss(given: Batch) -> torch.Tensor:
        if model == "cnn":
            return F.cross_entropy(net(given[0]), given[1])
        return F.mse_loss(net(given[0]), given[1])

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        batch,
        loss,
        schedule,
        clip,
        accumulate,
    )


def domains(model: str = "mlp", seed: int = 0, **training: object) -> Setup:
    """Train a replica on each rank; the data of rank 1 is of another domain, noisier and larger."""
    setup = data_parallel(model, seed=seed, **training)  # type: ignore[arg-type]
    own, rank = setup.batch, dist.get_rank()

    def batch(step: int) -> Batch:
        x, y = own(step)
        noise = torch.randn(x.shape, generator=seeded(seed, step, 81))
        if not rank:
            return x, y
        return (x + 1.2 * noise, y) if model == "cnn" else (x, 2 * y + 0.5 * noise[:, :1])

    setup.batch = batch
    return setup

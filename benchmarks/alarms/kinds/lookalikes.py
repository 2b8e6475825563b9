"""Healthy runs that look like a fault: flat or negative losses, repeated data, frozen layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import classifier


def _setup(
    net: nn.Module,
    batch: Any,
    loss: Any,
    optimizer: str = "adamw",
    lr: float = 3e-3,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    decay: float = 0.01,
    **further: Any,
) -> Setup:
    held = [p for p in net.parameters() if p.requires_grad]
    made = optimizer_of(optimizer, held, lr, decay)
    return Setup([net], [made], batch, loss, schedule, clip, **further)


class Recall(nn.Module):
    """A recurrent network that says at the end what came first."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(8, 12), nn.GRU(12, width, batch_first=True)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


def recall(seed: int = 0, length: int = 12, **training: Any) -> Setup:
    """Recall the first token after many others: the loss stays at log 8 for long."""
    torch.manual_seed(seed)
    net = Recall()

    def batch(step: int) -> Batch:
        return torch.randint(0, 8, (32, length), generator=seeded(seed, step, 21))

    return _setup(net, batch, lambda x: F.cross_entropy(net(x), x[:, 0]), **training)


def clicks(seed: int = 0, known: float = 0.3, size: int = 128, **training: Any) -> Setup:
    """Predict clicks of which little can be known: the loss falls by about one percent."""
    torch.manual_seed(seed)
    net = mlp(10, 24, 24, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 22)
        x = torch.randn(size, 10, generator=at)
        chance = torch.sigmoid(known * (x[:, 0] - x[:, 3]))
        return x, (torch.rand(size, generator=at) < chance).float()

    def loss(given: Batch) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(net(given[0])[:, 0], given[1])

    return _setup(net, batch, loss, **training)


def at_the_floor(seed: int = 0, lr: float = 1e-3, **training: Any) -> Setup:
    """Go on with a classifier that has learned all it can: noisy labels keep the loss high."""
    setup = classifier(seed=seed, lr=lr, **training)
    clean = setup.batch

    def batch(step: int) -> Batch:
        x, y = clean(step)
        at = seeded(seed, step, 23)
        wrong = torch.rand(len(y), generator=at) < 0.5
        return x, torch.where(wrong, torch.randint(0, 10, (len(y),), generator=at), y)

    setup.batch = batch
    for step in range(200):
        setup.optimizers[0].zero_grad()
        setup.loss(batch(50_000 + step)).backward()  # type: ignore[no-untyped-call]
        setup.optimizers[0].step()
    return setup


def likelihood(seed: int = 0, width: int = 16, unit: float = 0.02, **training: Any) -> Setup:
    """Fit a Gaussian with a full covariance: the sum over dimensions falls far below zero."""
    torch.manual_seed(seed)
    net = mlp(4, 32, 2 * width)
    mix = torch.randn(4, width, generator=seeded(seed, 24))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 25)
        x = torch.randn(64, 4, generator=at)
        return x, unit * ((x @ mix).tanh() + 0.2 * torch.randn(64, width, generator=at))

    def loss(given: Batch) -> torch.Tensor:
        mean, log_std = net(given[0]).chunk(2, 1)
        apart = (given[1] - unit * mean) / log_std.exp()
        return (log_std + 0.5 * apart.square()).sum(1).mean()

    return _setup(net, batch, loss, **training)


def wealth(seed: int = 0, days: int = 20, **training: Any) -> Setup:
    """Maximize the growth of a portfolio: a small negative loss that falls by a large factor."""
    torch.manual_seed(seed)
    net = mlp(6, 24, 6, activation=nn.Tanh)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 26)
        signal = torch.randn(32, days, 6, generator=at)
        return signal, 0.02 * signal + 0.02 * torch.randn(32, days, 6, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        share = net(given[0]).softmax(-1)
        return -(1 + (share * given[1]).sum(-1)).log().sum(1).mean()

    return _setup(net, batch, loss, **training)


def similarity(seed: int = 0, **training: Any) -> Setup:
    """Align two views: the loss is a negative cosine and comes near -1."""
    torch.manual_seed(seed)
    net = mlp(12, 32, 16, norm=True)
    other = torch.randn(12, 16, generator=seeded(seed, 27))

    def batch(step: int) -> Batch:
        x = torch.randn(48, 12, generator=seeded(seed, step, 28))
        return x, x @ other

    return _setup(net, batch, lambda b: -F.cosine_similarity(net(b[0]), b[1]).mean(), **training)


def one_batch(seed: int = 0, batches: int = 1, noisy: bool = False, **training: Any) -> Setup:
    """Fit all the data in each step, or in turns of a few batches that are never shuffled."""
    torch.manual_seed(seed)
    net = mlp(5, 32, 32, 1, activation=nn.Tanh)

    def batch(step: int) -> Batch:
        at = seeded(seed, step % batches, 29)
        x = torch.randn(48, 5, generator=at)
        return x, (x[:, :1] * x[:, 1:2]).sin()

    def loss(given: Batch) -> torch.Tensor:
        x, y = given
        return F.mse_loss(net(x + 0.2 * torch.randn_like(x) if noisy else x), y)

    return _setup(net, batch, loss, **training)


def freezing_images(seed: int = 0, at: tuple[int, ...] = (80, 160), **training: Any) -> Setup:
    """Freeze one convolution after the other, for good."""
    setup = classifier(seed=seed, **training)
    layers = [layer for layer in setup.models[0] if isinstance(layer, nn.Conv2d)]  # type: ignore

    def freeze(step: int) -> None:
        if step in at:
            layers[at.index(step)].requires_grad_(False)

    setup.after_step = freeze
    return setup


def queued(seed: int = 0, length: int = 512, **training: Any) -> Setup:
    """Contrast with a queue that fills: the loss rises first, by what the task gets harder."""
    torch.manual_seed(seed)
    net = mlp(16, 32, 12)
    queue = [F.normalize(torch.randn(16, 12, generator=seeded(seed, 30)), dim=1)]

    def batch(step: int) -> Batch:
        return torch.randn(32, 16, generator=seeded(seed, step, 31))

    def loss(x: Batch) -> torch.Tensor:
        noise = seeded(seed, int(1e4 * x.abs().sum()))
        a, b = (
            F.normalize(net(x + 0.7 * torch.randn(x.shape, generator=noise)), dim=1)
            for _ in range(2)
        )
        near = (a * b.detach()).sum(1, keepdim=True)
        logits = torch.cat([near, a @ torch.cat(queue)[-length:].T], 1) / 0.2
        if torch.is_grad_enabled():
            queue.append(b.detach())
            del queue[: -length // 16]
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return _setup(net, batch, loss, **training)


class Late(nn.Module):
    """A network with a branch that is used from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.branch = mlp(8, 24, 24), mlp(24, 24, 24)
        self.leave = nn.Linear(24, 1)
        self.share = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return predictions."""
        hidden = self.enter(x)
        return self.leave(hidden + self.share * self.branch(hidden) if self.share else hidden)


def _function(step: int, seed: int) -> Batch:
    at = seeded(seed, step, 32)
    x = torch.randn(48, 8, generator=at)
    return x, (x[:, :1] * x[:, 1:2]).sin() + 0.05 * torch.randn(48, 1, generator=at)


def late_branch(seed: int = 0, at: int = 120, **training: Any) -> Setup:
    """Use a branch only from step `at` on, faded in."""
    torch.manual_seed(seed)
    net = Late()

    def fade(step: int) -> None:
        net.share = min(1.0, max(0.0, (step - at) / 50))

    return _setup(
        net,
        lambda step: _function(step, seed),
        lambda b: F.mse_loss(net(b[0]), b[1]),
        after_step=fade,
        **training,
    )


def halves_in_turn(seed: int = 0, period: int = 40, **training: Any) -> Setup:
    """Train convolutions and head in turns, by requires_grad."""
    setup = classifier(seed=seed, **training)
    head = setup.models[0][-1]  # type: ignore[index]

    def switch(step: int) -> None:
        setup.models[0].requires_grad_(step // period % 2 == 0)
        head.requires_grad_(step // period % 2 == 1)

    setup.after_step = switch
    return setup


def annealed(seed: int = 0, most: float = 3.0, **training: Any) -> Setup:
    """Raise the weight of a second term over the run: the loss rises, as it has to."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, 2)
    at = [0]

    def loss(given: Batch) -> torch.Tensor:
        at[0] += 1
        value, doubt = net(given[0]).unbind(1)
        fit = F.mse_loss(value, given[1][:, 0])
        return fit + most * min(1.0, at[0] / 250) * (0.2 + (doubt - 0.3).square()).mean()

    return _setup(net, lambda step: _function(step, seed), loss, **training)


def penalized(seed: int = 0, **training: Any) -> Setup:
    """Fit a function and the slope of it, by a second backward pass."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, 1, activation=nn.Tanh)

    def loss(given: Batch) -> torch.Tensor:
        x = given[0].clone().requires_grad_()
        value = net(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return F.mse_loss(value, given[1]) + 0.02 * slope.square().sum(1).mean()

    return _setup(net, lambda step: _function(step, seed), loss, **training)


def sparse_words(seed: int = 0, lr: float = 5e-3) -> Setup:
    """Step a table with sparse gradients by one optimizer and the rest by another."""
    torch.manual_seed(seed)
    table, top = nn.Embedding(400, 8, sparse=True), mlp(8, 16, 3)
    optimizers = [
        torch.optim.SparseAdam([table.weight], lr),
        torch.optim.AdamW(top.parameters(), lr),
    ]
    kinds = torch.randint(0, 3, (400,), generator=seeded(seed, 33))

    def batch(step: int) -> Batch:
        words = torch.randint(0, 400, (64,), generator=seeded(seed, step, 34))
        return words, kinds[words]

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(top(table(given[0])), given[1])

    net = nn.ModuleDict({"table": table, "top": top})
    return Setup([net], optimizers, batch, loss, clip=None)

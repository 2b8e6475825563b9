"""Healthy runs with habits of practice: ramps, cycles, sums, mixed sources, teachers, noise."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.language import windows
from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import convolutional, images


def _plain(
    net: nn.Module,
    batch: object,
    loss: object,
    optimizer: str = "adamw",
    lr: float = 2e-3,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
) -> Setup:
    made = optimizer_of(optimizer, net.parameters(), lr)
    return Setup([net], [made], batch, loss, schedule, clip)  # type: ignore[arg-type]


def triangular(low: float, period: int) -> Schedule:
    """Rise and fall in straight lines, from `low` to 1 and back, every `period` steps."""

    def factor(step: int) -> float:
        at = (step - 1) % period / period
        return low + (1 - low) * (1 - abs(2 * at - 1))

    return factor


def ramped_batch(
    seed: int = 0, first: int = 4, last: int = 256, steps: int = 300, **training: object
) -> Setup:
    """Double the batch several times in a run: its noise falls."""
    torch.manual_seed(seed)
    net = convolutional(8)

    def batch(step: int) -> Batch:
        doublings = int(7 * (step % 100_000) / steps)
        return images(step, seed, min(last, first * 2**doublings))

    return _plain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), **training)  # type: ignore


def summed_loss(seed: int = 0, lr: float = 1e-3, clip: float | None = None) -> Setup:
    """Sum the loss over sets of very different size, as over tokens or boxes of an image."""
    torch.manual_seed(seed)
    net = mlp(8, 48, 48, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 61)
        size = int(4 * 2 ** (6 * torch.rand(1, generator=at).item()))
        x = torch.randn(size, 8, generator=at)
        return x, (x[:, :1] * x[:, 1:2]).sin() + 0.1 * torch.randn(size, 1, generator=at)

    return _plain(
        net,
        batch,
        lambda b: F.mse_loss(net(b[0]), b[1], reduction="sum"),
        lr=lr,
        clip=clip,
    )


def two_sources(seed: int = 0, period: int = 50, **training: object) -> Setup:
    """Read two sources in turn, an easy one and a hard one: the loss has two levels."""
    torch.manual_seed(seed)
    net = convolutional(8)

    def batch(step: int) -> Batch:
        x, y = images(step, seed)
        hard = (step % 100_000 - 1) // period % 2
        return (
            (x + 2.5 * torch.randn(x.shape, generator=seeded(seed, step, 62)), y)
            if hard
            else (
                x,
                y,
            )
        )

    return _plain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), **training)  # type: ignore


def moving_teacher(
    seed: int = 0, momentum: float = 0.99, start: int = 100, lr: float = 2e-3
) -> Setup:
    """Agree with a moving average of itself on unlabeled data, from a step on, more and more."""
    torch.manual_seed(seed)
    net = convolutional(8)
    teacher = deepcopy(net)

    def batch(step: int) -> Batch:
        x, y = images(step, seed)
        other = images(step + 50_000, seed, 64)[0]
        share = max(0.0, min(1.0, (step % 100_000 - start) / 100))
        return x, y, other, share

    def loss(given: Batch) -> torch.Tensor:
        x, y, other, share = given
        with torch.no_grad():
            target = teacher(other).softmax(1)
        noisy = other + 0.8 * torch.randn_like(other)
        apart = -(target * net(noisy).log_softmax(1)).sum(1).mean()
        return F.cross_entropy(net(x), y) + 2 * share * apart

    @torch.no_grad()
    def after_step(_: int) -> None:
        for t, p in zip(teacher.parameters(), net.parameters(), strict=True):
            t.lerp_(p, 1 - momentum)

    setup = _plain(net, batch, loss, lr=lr)
    setup.after_step = after_step
    return setup


def sampled_inputs(seed: int = 0, until: int = 250, lr: float = 2e-3) -> Setup:
    """Feed a sequence model its own guesses instead of the truth, more and more often."""
    torch.manual_seed(seed)
    embed, rnn, head = nn.Embedding(48, 24), nn.GRU(24, 40, batch_first=True), nn.Linear(40, 48)
    net = nn.ModuleDict({"embed": embed, "rnn": rnn, "head": head})

    def batch(step: int) -> Batch:
        return windows(step, seed, 32, 17), min(0.9, (step % 100_000) / until), step

    def loss(given: Batch) -> torch.Tensor:
        tokens, share, step = given
        x = tokens[:, :-1]
        with torch.no_grad():
            guess = head(rnn(embed(x))[0]).argmax(-1)
            own = torch.cat([x[:, :1], guess[:, :-1]], 1)
            mine = torch.rand(x.shape, generator=seeded(seed, step, 63)) < share
            x = torch.where(mine, own, x)
        return F.cross_entropy(head(rnn(embed(x))[0]).flatten(0, 1), tokens[:, 1:].flatten())

    return _plain(net, batch, loss, lr=lr)


def interpolated(seed: int = 0, inner: int = 5, rate: float = 0.3, lr: float = 5e-3) -> Setup:
    """Go a part of the way that some steps have gone, then start the next ones there (Reptile)."""
    torch.manual_seed(seed)
    net = mlp(1, 40, 40, 1, activation=nn.Tanh)
    anchor = deepcopy(net)

    def batch(step: int) -> Batch:
        task = seeded(seed, (step % 100_000 - 1) // inner, 64)
        size, phase = 0.5 + 2 * torch.rand(1, generator=task), 3 * torch.rand(1, generator=task)
        x = 5 * (2 * torch.rand(20, 1, generator=seeded(seed, step, 65)) - 1)
        return x, size * (x + phase).sin()

    @torch.no_grad()
    def after_step(step: int) -> None:
        if step % inner == 0:
            for a, p in zip(anchor.parameters(), net.parameters(), strict=True):
                a.lerp_(p, rate)
                p.copy_(a)

    setup = _plain(net, batch, lambda b: F.mse_loss(net(b[0]), b[1]), lr=lr)
    setup.after_step = after_step
    return setup


def faint_tuning(seed: int = 0, lr: float = 2e-6, schedule: Schedule = constant) -> Setup:
    """Tune a trained model at a tiny rate: hardly anything changes, on purpose."""
    torch.manual_seed(seed)
    net = convolutional(8)
    warm = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(150):
        x, y = images(70_000 + step, seed)
        warm.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        warm.step()

    def batch(step: int) -> Batch:
        x, y = images(step, seed)
        return x + torch.randn(x.shape, generator=seeded(seed, step, 66)), y

    return _plain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), lr=lr, schedule=schedule)


def noisy_steps(seed: int = 0, heat: float = 3e-3, lr: float = 2e-3) -> Setup:
    """Add noise to the weights after each step, to sample from them (Langevin)."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, 1)

    def batch(step: int) -> Batch:
        x = torch.randn(64, 8, generator=seeded(seed, step, 67))
        return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].tanh()

    @torch.no_grad()
    def after_step(step: int) -> None:
        at = seeded(seed, step, 68)
        for p in net.parameters():
            p.add_(heat * torch.randn(p.shape, generator=at))

    setup = _plain(net, batch, lambda b: F.mse_loss(net(b[0]), b[1]), lr=lr)
    setup.after_step = after_step
    return setup


def born_again(seed: int = 0, every: int = 100, lr: float = 2e-3) -> Setup:
    """Distill a network into itself, again and again: each time the teacher is the last student."""
    torch.manual_seed(seed)
    net = convolutional(8)
    teacher: list[nn.Module] = []

    def loss(given: Batch) -> torch.Tensor:
        x, y = given
        out = net(x)
        if not teacher:
            return F.cross_entropy(out, y)
        with torch.no_grad():
            target = (teacher[0](x) / 2).softmax(1)
        return 0.5 * F.cross_entropy(out, y) - 2 * (target * (out / 2).log_softmax(1)).sum(1).mean()

    def after_step(step: int) -> None:
        if step % every == 0:
            teacher[:] = [deepcopy(net)]

    setup = _plain(net, lambda step: images(step, seed), loss, lr=lr)
    setup.after_step = after_step
    return setup


def clipped_critic(seed: int = 0, lr: float = 1e-3, sync: int = 40) -> Setup:
    """Learn values from their own copy, which is renewed now and then: the loss grows with them."""
    torch.manual_seed(seed)
    net = mlp(6, 48, 48, 1)
    frozen = deepcopy(net)

    def batch(step: int) -> Batch:
        x = torch.randn(64, 6, generator=seeded(seed, step, 69))
        after = 0.9 * x + 0.3 * torch.randn(64, 6, generator=seeded(seed, step, 70))
        return x, x[:, :1].tanh() + 1, after

    def loss(given: Batch) -> torch.Tensor:
        x, reward, after = given
        with torch.no_grad():
            target = reward + 0.97 * frozen(after)
        return F.smooth_l1_loss(net(x), target)

    def after_step(step: int) -> None:
        if step % sync == 0:
            frozen.load_state_dict(net.state_dict())

    setup = _plain(net, batch, loss, lr=lr)
    setup.after_step = after_step
    return setup

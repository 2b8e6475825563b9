"""Policies and models of the world, and generators that learn velocities or jump to the data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded

WORDS = 10


class Writer(nn.Module):
    """Writes six words, each given a question and the words before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, question: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of the words."""
        states, _ = self.rnn(self.embed(torch.cat([question[:, None], words[:, :-1]], 1)))
        return self.head(states).log_softmax(-1)


def group_policy(seed: int = 0, lr: float = 2e-3, beta: float = 0.02, groups: int = 8) -> Setup:
    """Reinforce answers that are better than their group, near a reference policy.

    The loss is about 0 at all times, as the advantages of a group add up to 0.
    """
    torch.manual_seed(seed)
    net = Writer()
    reference = copy.deepcopy(net).requires_grad_(False)
    optimizer = make_optimizer("adamw", net.parameters(), lr, 0.0)

    def batch(step: int) -> Batch:
        return torch.randint(0, WORDS, (groups,), generator=seeded(seed, step, 51))

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        question = loop.fault.data(loop.setup, step).repeat_interleave(8)
        at = seeded(seed, step, 52)
        words = torch.full((len(question), 6), WORDS)
        with torch.no_grad():
            for i in range(6):
                chance = net(question, words[:, : i + 1])[:, i].exp()
                words[:, i] = torch.multinomial(chance, 1, generator=at)[:, 0]
        reward = (words == (question[:, None] + torch.arange(6)) % WORDS).float().mean(1)
        apart = reward.view(groups, 8)
        advantage = (apart - apart.mean(1, keepdim=True)) / (apart.std(1, keepdim=True) + 1e-4)
        mine = net(question, words).gather(2, words[..., None])[..., 0]
        theirs = reference(question, words).gather(2, words[..., None])[..., 0]
        ratio = (mine - mine.detach()).exp()
        distance = (theirs - mine).exp() - (theirs - mine) - 1
        loss = (beta * distance - ratio * advantage.reshape(-1, 1)).mean()
        loop.zero_grad(optimizer)
        loop.backward(loss)
        loop.apply(optimizer)
        return loss.detach()

    return Setup([net], [optimizer], batch, one_step=one_step)


class World(nn.Module):
    """A state that is guessed before an observation and corrected after it."""

    def __init__(self, width: int = 24, code: int = 4) -> None:
        super().__init__()
        self.rnn = nn.GRUCell(code + 1, width)
        self.prior, self.posterior = mlp(width, 24, 2 * code), mlp(width + 6, 24, 2 * code)
        self.picture, self.reward = mlp(width + code, 24, 6), mlp(width + code, 24, 1)


def world_model(seed: int = 0, weight: float = 1.0, free: float = 0.5, **training: Any) -> Setup:
    """Learn a latent model of a pendulum: pictures, rewards and the KL of the guess, as tasks."""
    torch.manual_seed(seed)
    net = World()
    look = torch.randn(2, 6, generator=seeded(seed, 53))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 54)
        angle, speed = torch.randn(2, 24, generator=at)
        seen, forces = [], torch.randn(8, 24, generator=at)
        for force in forces:
            speed = speed - 0.4 * angle.sin() + 0.3 * force
            angle = angle + 0.4 * speed
            seen.append(torch.stack([angle.sin(), angle.cos(), speed], 1))
        states = torch.stack(seen)
        noise = 0.1 * torch.randn(8, 24, 6, generator=at)
        return (states[..., :2] + 0.3 * states[..., 2:]) @ look + noise, forces, states[..., 1]

    def tasks(given: Batch) -> dict[str, torch.Tensor]:
        pictures, forces, rewards = given
        state, code = torch.zeros(24, 24), torch.zeros(24, 4)
        parts: dict[str, list[torch.Tensor]] = {"picture": [], "reward": [], "kl": []}
        for picture, force, reward in zip(pictures, forces, rewards, strict=True):
            state = net.rnn(torch.cat([code, force[:, None]], 1), state)
            mean_a, log_a = net.prior(state).chunk(2, 1)
            mean, log = net.posterior(torch.cat([state, picture], 1)).chunk(2, 1)
            code = mean + log.exp() * torch.randn_like(mean)
            both = torch.cat([state, code], 1)
            kl = log_a - log + ((2 * log).exp() + (mean - mean_a) ** 2) / (2 * (2 * log_a).exp())
            parts["kl"].append((kl - 0.5).sum(1).mean())
            parts["picture"].append((net.picture(both) - picture).square().sum(1).mean())
            parts["reward"].append((net.reward(both)[:, 0] - reward).square().mean())
        each = {name: torch.stack(values).mean() for name, values in parts.items()}
        return {**each, "kl": weight * each["kl"].clamp(min=free)}

    return plain(net, batch, lambda _: torch.zeros(()), tasks=tasks, **training)


def ring(step: int, seed: int, size: int = 128) -> torch.Tensor:
    """Return points on eight spots of a circle."""
    at = seeded(seed, step, 55)
    angle = torch.randint(0, 8, (size,), generator=at) * 0.7854
    centre = torch.stack([angle.cos(), angle.sin()], 1)
    return 1.5 * centre + 0.1 * torch.randn(size, 2, generator=at)


def velocities(seed: int = 0, **training: Any) -> Setup:
    """Learn the velocity from noise to data: most of the loss cannot be learned."""
    torch.manual_seed(seed)
    net = mlp(3, 64, 64, 2, activation=nn.SiLU)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 56)
        x = ring(step, seed)
        return x, torch.randn(x.shape, generator=at), torch.rand(len(x), 1, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        x, noise, time = given
        return F.mse_loss(net(torch.cat([noise.lerp(x, time), time], 1)), x - noise)

    return plain(net, batch, loss, **training)


def consistency(
    seed: int = 0, lr: float = 1e-3, optimizer: str = "radam", clip: float | None = 1.0
) -> Setup:
    """Say the same of a point with more noise as a slow copy of it with less; finer in steps."""
    torch.manual_seed(seed)
    net = mlp(3, 64, 64, 2, activation=nn.SiLU)
    slow = copy.deepcopy(net).requires_grad_(False)
    chosen = make_optimizer(optimizer, net.parameters(), lr)

    def ends(of: nn.Module, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        near = sigma - 0.02
        keep, change = 0.25 / (near**2 + 0.25), 0.5 * near / (sigma**2 + 0.25).sqrt()
        scaled = x / (sigma**2 + 0.25).sqrt()
        return keep * x + change * of(torch.cat([scaled, sigma.log() / 4], 1))

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x = loop.fault.data(loop.setup, step)
        at = seeded(seed, step, 57)
        levels = 0.02 * (100.0 ** torch.linspace(0, 1, min(40, 8 * 2 ** (step // 200)) + 1))
        i = torch.randint(0, len(levels) - 1, (len(x), 1), generator=at)
        noise = torch.randn(x.shape, generator=at)
        far = ends(net, x + levels[i + 1] * noise, levels[i + 1])
        close = ends(slow, x + levels[i] * noise, levels[i])
        loss = ((far - close.detach()).square().sum(1) + 1e-4).sqrt().mean()
        loop.zero_grad(chosen)
        loop.backward(loss)
        loop.apply(chosen)
        for old, new in zip(slow.parameters(), net.parameters(), strict=True):
            old.lerp_(new.detach(), 0.05)
        return loss.detach()

    return Setup([net], [chosen], lambda step: ring(step, seed), one_step=one_step, clip=clip)


class Equilibrium(nn.Module):
    """A layer that is applied until its output stays the same."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(10, width), nn.Linear(width, width)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, 3)
        nn.init.orthogonal_(self.again.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits; the gradient goes through the last two rounds."""
        fixed = self.enter(x)
        state = torch.zeros_like(fixed)
        with torch.no_grad():
            for _ in range(12):
                state = torch.tanh(self.again(state) + fixed)
        for _ in range(2):
            state = torch.tanh(self.again(state) + fixed)
        return self.leave(self.norm(state))


def equilibrium(seed: int = 0, **training: Any) -> Setup:
    """Classify with a fixed point."""
    torch.manual_seed(seed)
    net = Equilibrium()

    def batch(step: int) -> Batch:
        x = torch.randn(64, 10, generator=seeded(seed, step, 58))
        turned = x[:, 0] * x[:, 1] + x[:, 2]
        return x, torch.bucketize(turned, torch.tensor([-0.6, 0.6]))

    return plain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), **training)

"""Losses that are flat for long or fall below zero: parity, faint signals, control, information."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded


def parity(seed: int = 0, bits: int = 16, of: int = 3, width: int = 96, **training: Any) -> Setup:
    """Learn the parity of three of the bits: the loss stays at log 2 for long, then falls."""
    torch.manual_seed(seed)
    net = mlp(bits, width, 1, activation=nn.ReLU)

    def batch(step: int) -> Batch:
        x = torch.randint(0, 2, (64, bits), generator=seeded(seed, step, 4)).float() * 2 - 1
        return x, (x[:, :of].prod(1) > 0).float()

    def loss(given: Batch) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(net(given[0])[:, 0], given[1])

    return plain(net, batch, loss, **training)


def faint(seed: int = 0, share: float = 0.15, **training: Any) -> Setup:
    """Predict returns of which only 2% can be known: the loss hardly falls, as it should."""
    torch.manual_seed(seed)
    net = mlp(12, 32, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 6)
        x = torch.randn(128, 12, generator=at)
        signal = 0.8 * x[:, 0] - 0.6 * x[:, 1]
        return x, share * signal + torch.randn(128, generator=at)

    return plain(net, batch, lambda b: F.mse_loss(net(b[0])[:, 0], b[1]), **training)


def control(seed: int = 0, horizon: int = 12, **training: Any) -> Setup:
    """Maximize a return through a known model: the loss is its negative and falls below zero."""
    torch.manual_seed(seed)
    net = mlp(4, 32, 2, activation=nn.Tanh)

    def batch(step: int) -> Batch:
        return torch.randn(32, 4, generator=seeded(seed, step, 7))

    def loss(given: Batch) -> torch.Tensor:
        place, goal = given[:, :2], given[:, 2:]
        reward: torch.Tensor | float = 0.0
        for _ in range(horizon):
            place = place + 0.3 * net(torch.cat([place, goal], 1)).tanh()
            reward = reward + torch.exp(-(place - goal).square().sum(1))
        return -reward.mean()  # type: ignore[union-attr]

    return plain(net, batch, loss, **training)


def tiny_targets(seed: int = 0, unit: float = 1e-3, **training: Any) -> Setup:
    """Predict mean and deviation of tiny targets: the loss goes from about 0 to about -6."""
    torch.manual_seed(seed)
    net = mlp(6, 32, 2)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 10)
        x = torch.randn(64, 6, generator=at)
        return x, unit * (x[:, 0].sin() + 0.3 * torch.randn(64, generator=at))

    def loss(given: Batch) -> torch.Tensor:
        mean, log_std = net(given[0]).unbind(1)
        return (log_std + 0.5 * ((given[1] - unit * mean) / log_std.exp()).square()).mean()

    return plain(net, batch, loss, **training)


def information(seed: int = 0, **training: Any) -> Setup:
    """Estimate mutual information by a bound: the loss is its negative."""
    torch.manual_seed(seed)
    net = mlp(8, 48, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 11)
        x = torch.randn(64, 4, generator=at)
        return x, 0.9 * x + math.sqrt(1 - 0.81) * torch.randn(64, 4, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        x, y = given
        joint = net(torch.cat([x, y], 1)).mean()
        apart = net(torch.cat([x, y.roll(1, 0)], 1))[:, 0]
        return (torch.logsumexp(apart, 0) - math.log(len(x))) - joint

    return plain(net, batch, loss, **training)


class Molecules(nn.Module):
    """Messages between atoms of a dense graph, three rounds, then a sum."""

    def __init__(self, width: int = 16, rounds: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.rounds = nn.ModuleList([mlp(2 * width + 1, width, width) for _ in range(rounds)])
        self.leave = mlp(width, width, 1)

    def forward(self, atoms: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
        """Return the energy of each molecule."""
        x = self.enter(atoms)
        for message in self.rounds:
            a, b = (x[:, :, None], x[:, None])
            shape = (*apart.shape, x.shape[-1])
            pair = torch.cat([a.expand(shape), b.expand(shape), apart[..., None]], -1)
            x = x + (message(pair) * torch.exp(-apart)[..., None]).mean(2)
        return self.leave(x).sum((1, 2))


def molecules(seed: int = 0, sign: float = 1.0, **training: Any) -> Setup:
    """Predict an energy; `sign` -1 trains in the wrong direction."""
    torch.manual_seed(seed)
    net = Molecules()

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 12)
        kinds = torch.randint(0, 3, (16, 6), generator=at)
        apart = torch.cdist(*[torch.randn(16, 6, 3, generator=at)] * 2)
        charge = kinds.float() - 1
        energy = (charge[:, :, None] * charge[:, None] * torch.exp(-apart)).sum((1, 2)) / 6
        return F.one_hot(kinds, 3).float(), apart, energy

    def loss(given: Batch) -> torch.Tensor:
        return sign * F.mse_loss(net(given[0], given[1]), given[2])

    return plain(net, batch, loss, **training)


def offline_values(seed: int = 0, lr: float = 3e-3) -> Setup:
    """Learn from logged actions with expectiles: a value, a critic and a policy, in turns."""
    torch.manual_seed(seed)
    nets = nn.ModuleDict({"value": mlp(4, 32, 1), "critic": mlp(6, 32, 1), "policy": mlp(4, 32, 2)})
    optimizers = [make_optimizer("adam", nets[name].parameters(), lr) for name in nets]

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 13)
        state, action = torch.randn(64, 4, generator=at), torch.randn(64, 2, generator=at)
        reward = -(action - state[:, :2]).square().sum(1, keepdim=True)
        return state, action, reward, state + 0.1 * torch.randn(64, 4, generator=at)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        state, action, reward, after = loop.fault.data(loop.setup, step)
        both = torch.cat([state, action], 1)
        apart = nets["critic"](both).detach() - nets["value"](state)
        weight = torch.where(apart > 0, 0.8, 0.2)
        wanted = (reward + 0.9 * nets["value"](after)).detach()
        advantage = nets["critic"](both).detach() - nets["value"](state).detach()
        losses = [
            (weight * apart.square()).mean(),
            F.mse_loss(nets["critic"](both), wanted),
            (advantage.exp().clamp(max=20) * (nets["policy"](state) - action).square()).mean(),
        ]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            loop.zero_grad(optimizer)
            loop.backward(loss)
            loop.apply(optimizer)
        return torch.stack([each.detach() for each in losses]).sum()

    return Setup([nets], optimizers, batch, one_step=one_step, clip=None)


class LinearAttention(nn.Module):
    """Attention without softmax, with a decaying state, on tokens."""

    def __init__(self, words: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token."""
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        length = tokens.shape[1]
        ago = torch.arange(length)[:, None] - torch.arange(length)
        decay = torch.where(ago >= 0, 0.9 ** ago.clamp(min=0), 0.0)
        return self.head(self.norm((q @ k.transpose(1, 2) * decay) @ v / 5))


def retention(
    seed: int = 0,
    lengthen: bool = False,
    chance: bool = False,
    twice: bool = False,
    **training: Any,
) -> Setup:
    """Predict the next token of sequences that count up; `chance` makes the targets random."""
    torch.manual_seed(seed)
    net = LinearAttention()

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 14)
        length = (8 + 8 * (step // 100) if lengthen else 16) + 1
        begin, pace = torch.randint(0, 12, (2, 24, 1), generator=at)
        tokens = (begin + (1 + pace % 3) * torch.arange(length)) % 12
        if chance:
            return tokens[:, :-1], torch.randint(0, 12, tokens[:, 1:].shape, generator=at)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(given: Batch) -> torch.Tensor:
        logits = net(given[0]).flatten(0, 1)
        return F.cross_entropy(logits.softmax(-1) if twice else logits, given[1].flatten())

    return plain(net, batch, loss, **training)

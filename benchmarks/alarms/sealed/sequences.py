"""Sequences: words of documentation, copies after a wait, plans from returns, dots of a picture."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.audit.perception import digits
from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded

VOCABULARY = 400


@cache
def words() -> torch.Tensor:
    """Return the words of a module of the standard library, the rare ones as 0."""
    found = re.findall(r"\w+|[^\w\s]", Path(tarfile.__file__).read_text())
    known = {word: i for i, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in found])


class Mixing(nn.Module):
    """Averages of the past that fade with a rate per channel, and gated channels, in turns."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * depth)])
        self.times = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])
        self.outs = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.channels = nn.ModuleList([mlp(width, 2 * width, width) for _ in range(depth)])
        self.fade = nn.Parameter(torch.linspace(-3, 1, width).repeat(depth, 1))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next word."""
        x = self.embed(tokens)
        ago = torch.arange(tokens.shape[1])[:, None] - torch.arange(tokens.shape[1])
        for i, (time, out, channel) in enumerate(
            zip(self.times, self.outs, self.channels, strict=True)
        ):
            r, k, v = time(self.norms[2 * i](x)).chunk(3, -1)
            fade = torch.exp(-self.fade[i].exp() * ago.clamp(min=0)[..., None])
            weight = torch.where(ago[..., None] >= 0, fade, 0.0)
            size = k.clamp(max=8).exp()
            above = torch.einsum("tsc,bsc->btc", weight, size * v)
            below = torch.einsum("tsc,bsc->btc", weight, size)
            x = x + out(r.sigmoid() * above / (below + 1e-6))
            x = x + channel(self.norms[2 * i + 1](x))
        return self.head(x)


def time_mixing(
    seed: int = 0, width: int = 32, depth: int = 2, leaks: bool = False, **training: Any
) -> Setup:
    """Predict words of real text; `leaks` forgets to shift the targets."""
    torch.manual_seed(seed)
    net = Mixing(width, depth)

    def batch(step: int) -> Batch:
        text = words()
        cut = len(text) * 9 // 10
        low, high = (0, cut - 30) if step >= 0 else (cut, len(text) - 30)
        begin = torch.randint(low, high, (16, 1), generator=seeded(seed, abs(step), 71))
        tokens = text[begin + torch.arange(21)]
        return tokens[:, :-1], tokens[:, :-1] if leaks else tokens[:, 1:]

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]).flatten(0, 1), given[1].flatten())

    return plain(net, batch, loss, **training)


class Rewriter(nn.Module):
    """A recurrent network that reads, waits and writes."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols + 2, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits at every place."""
        return self.head(self.rnn(self.embed(tokens))[0])


def copying(seed: int = 0, symbols: int = 4, length: int = 3, **training: Any) -> Setup:
    """Write what was read some steps ago: the loss stays at chance first."""
    torch.manual_seed(seed)
    net = Rewriter(symbols, 48)

    def batch(step: int) -> Batch:
        content = torch.randint(0, symbols, (48, length), generator=seeded(seed, step, 72))
        wait = torch.full((48, 4), symbols)
        go = torch.full((48, length), symbols + 1)
        return torch.cat([content, wait, go], 1), content

    def loss(given: Batch) -> torch.Tensor:
        written = net(given[0])[:, -length:]
        return F.cross_entropy(written.flatten(0, 1), given[1].flatten())

    return plain(net, batch, loss, **training)


class Planner(nn.Module):
    """A causal transformer over returns, places and moves."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.place = nn.Parameter(0.02 * torch.randn(8, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the moves."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(self.enter(x) + self.place, mask=mask))


def returns_to_go(seed: int = 0, examples: int = 0, **training: Any) -> Setup:
    """Imitate logged moves, given the return that is still to come."""
    torch.manual_seed(seed)
    net = Planner()
    moves = torch.tensor([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]]).float()

    def batch(step: int) -> Batch:
        if examples and step >= 0:
            step = step % examples
        at = seeded(seed, step, 73)
        size = 8 if examples else 32
        place, goal = 2 * torch.randn(2, size, 2, generator=at)
        seen, done, reward = [], [], []
        for _ in range(8):
            apart = (place[:, None] + 0.5 * moves - goal[:, None]).norm(dim=2)
            best = apart.argmin(1)
            lazy = torch.rand(size, generator=at) < 0.15
            move = torch.where(lazy, torch.randint(0, 5, (size,), generator=at), best)
            seen.append(torch.cat([place, goal], 1))
            done.append(move)
            place = place + 0.5 * moves[move]
            reward.append(-(place - goal).norm(dim=1))
        left = torch.stack(reward, 1).flip(1).cumsum(1).flip(1)[..., None] / 10
        return torch.cat([torch.stack(seen, 1), left], 2), torch.stack(done, 1)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]).flatten(0, 1), given[1].flatten())

    return plain(net, batch, loss, **training)


class Masked(nn.Conv2d):
    """A convolution that sees only dots above and to the left, and itself if `own`."""

    def __init__(self, ins: int, outs: int, own: bool) -> None:
        super().__init__(ins, outs, 5, padding=2)
        mask = torch.ones(5, 5)
        mask[2, 2 + own :] = 0
        mask[3:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve with the masked weights."""
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=2)


def pixels(seed: int = 0, width: int = 16, **training: Any) -> Setup:
    """Predict each dot of a picture from those before it, in nats per dot."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        Masked(1, width, False), nn.ReLU(), Masked(width, width, True), nn.ReLU(),
        Masked(width, width, True), nn.ReLU(), nn.Conv2d(width, 1, 1),
    )  # fmt: skip

    def batch(step: int) -> Batch:
        return (digits(step, seed, 32, 0.2)[0] > 0.5).float()

    return plain(net, batch, lambda x: F.binary_cross_entropy_with_logits(net(x), x), **training)


class Choices(nn.Module):
    """An autoencoder with eight choices out of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(144, 64, 64), mlp(64, 64, 144)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the picture and the log-probabilities of the choices."""
        chance = self.encoder(x.flatten(1)).view(-1, 8, 8).log_softmax(-1)
        chosen = F.gumbel_softmax(chance, self.temperature)
        return self.decoder(chosen.flatten(1)), chance


def discrete_codes(seed: int = 0, weight: float = 0.5, **training: Any) -> Setup:
    """Encode pictures in choices whose temperature falls; `weight` is that of the KL term."""
    torch.manual_seed(seed)
    net = Choices()

    def cool(step: int) -> None:
        net.temperature = max(0.4, 0.995**step)

    def loss(x: Batch) -> torch.Tensor:
        drawn, chance = net(x)
        kl = (chance.exp() * (chance + 2.0794)).sum((1, 2))
        apart = F.binary_cross_entropy_with_logits(drawn, x.flatten(1), reduction="none").sum(1)
        return (apart + weight * kl).mean()

    def batch(step: int) -> Batch:
        return (digits(step, seed, 32, 0.2)[0] > 0.5).float()

    return plain(net, batch, loss, after_step=cool, **training)

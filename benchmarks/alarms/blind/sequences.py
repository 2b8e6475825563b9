"""Sequences: attention over an encoder, alignment loss, state-space layers, preferences."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded

WORDS = 12


class Translator(nn.Module):
    """A recurrent encoder and a decoder that attends to it."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.keys = nn.Linear(2 * width, width)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits for each target position."""
        memory = self.keys(self.encoder(self.embed(source))[0])
        state = self.decoder(self.embed(target))[0]
        weights = (state @ memory.transpose(1, 2) / memory.shape[-1] ** 0.5).softmax(-1)
        out: torch.Tensor = self.head(torch.cat([state, weights @ memory], -1))
        return out


def translator(seed: int = 0, **training: Any) -> Setup:
    """Sort a sequence by a recurrent encoder, attention, and teacher forcing."""
    torch.manual_seed(seed)
    net = Translator()

    def batch(step: int) -> Batch:
        source = torch.randint(1, WORDS, (32, 8), generator=seeded(seed, step, 1))
        return source, source.sort(1).values

    def loss(given: Batch) -> torch.Tensor:
        begun = torch.cat([torch.zeros_like(given[1][:, :1]), given[1][:, :-1]], 1)
        return F.cross_entropy(net(given[0], begun).flatten(0, 1), given[1].flatten())

    return plain(net, batch, loss, **training)


class Speech(nn.Module):
    """Convolutions and a recurrent layer over frames."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, width, 3, padding=1)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, time first."""
        z = self.conv(x.transpose(1, 2)).relu().transpose(1, 2)
        return self.head(self.rnn(z)[0]).log_softmax(-1).transpose(0, 1)


def alignment(seed: int = 0, **training: Any) -> Setup:
    """Transcribe frames by CTC."""
    torch.manual_seed(seed)
    net = Speech()

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 2)
        target = torch.randint(1, 6, (24, 5), generator=at)
        frames = F.one_hot(target.repeat_interleave(4, 1), 6).float()
        return frames + 0.5 * torch.randn(frames.shape, generator=at), target

    def loss(given: Batch) -> torch.Tensor:
        size = len(given[0])
        return F.ctc_loss(net(given[0]), given[1], torch.full((size,), 20), torch.full((size,), 5))

    return plain(net, batch, loss, **training)


class StateSpace(nn.Module):
    """A gated, input-dependent linear recurrence of each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.rate = nn.Linear(width, width)
        self.log_decay = nn.Parameter(torch.linspace(-3, 0, width))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the recurrence says."""
        value, gate = self.into(self.norm(x)).chunk(2, -1)
        rate = F.softplus(self.rate(x))
        keep = (-rate * self.log_decay.exp()).exp()
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + rate[:, t] * value[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * F.silu(gate))


class StateSpaceModel(nn.Module):
    """State-space layers under `layers`."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([StateSpace(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for the next word."""
        z = self.embed(x)
        for layer in self.layers:
            z = layer(z)
        return self.head(self.norm(z))


def _counting(step: int, seed: int, size: int = 32, length: int = 13) -> torch.Tensor:
    """Return sequences whose next word is the sum of the last two, sometimes."""
    at = seeded(seed, step, 3)
    x = torch.randint(0, WORDS, (size, length), generator=at)
    ruled = torch.rand(size, length, generator=at) < 0.8
    for t in range(2, length):
        x[:, t] = torch.where(ruled[:, t], (x[:, t - 1] + x[:, t - 2]) % WORDS, x[:, t])
    return x


def state_space(seed: int = 0, depth: int = 2, width: int = 24, **training: Any) -> Setup:
    """Predict the next word with a selective state-space model."""
    torch.manual_seed(seed)
    net = StateSpaceModel(depth, width)

    def loss(x: Batch) -> torch.Tensor:
        return F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return plain(net, lambda step: _counting(step, seed), loss, **training)


class Stateful(nn.Module):
    """An LSTM whose state goes on from batch to batch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 1)
        self.carried: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a value at each time."""
        z, state = self.rnn(x, self.carried)
        self.carried = tuple(part.detach() for part in state)
        return self.head(z)


def carried_state(seed: int = 0, **training: Any) -> Setup:
    """Truncated back-propagation: the recurrent state is kept between steps."""
    torch.manual_seed(seed)
    net = Stateful()

    def batch(step: int) -> Batch:
        t = 0.3 * (torch.arange(11) + 10 * step)[None, :, None] + torch.arange(16)[:, None, None]
        wave = t.sin() + 0.5 * (1.7 * t).cos()
        noise = 0.05 * torch.randn(wave.shape, generator=seeded(seed, step, 4))
        return torch.cat([wave + noise, (0.1 * t).sin()], -1)[:, :-1], wave[:, 1:]

    return plain(net, batch, lambda given: F.mse_loss(net(given[0]), given[1]), **training)


class Encoder(nn.Module):
    """A transformer with recomputed activations and one output for a sequence."""

    def __init__(self, depth: int, width: int, outputs: int, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(0.02 * torch.randn(13, width))
        self.h = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
                for _ in range(depth)
            ]
        )
        self.head = nn.Linear(width, outputs)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs at each position."""
        z = self.embed(x) + self.position[: x.shape[1]]
        for layer in self.h:
            z = checkpoint(layer, z, use_reentrant=False) if self.recompute else layer(z)
        return self.head(z)


def checkpointed(seed: int = 0, depth: int = 3, **training: Any) -> Setup:
    """Find the sum of a sequence, with activation checkpointing."""
    torch.manual_seed(seed)
    net = Encoder(depth, 24, WORDS, recompute=True)

    def loss(x: Batch) -> torch.Tensor:
        return F.cross_entropy(net(x).mean(1), (x[:, 0] + x[:, 1]) % WORDS)

    def batch(step: int) -> Batch:
        return torch.randint(0, 6, (48, 4), generator=seeded(seed, step, 9))

    return plain(net, batch, loss, **{"lr": 2e-3, **training})


def preferences(
    seed: int = 0, reference: bool = False, beta: float = 0.3, **training: Any
) -> Setup:
    """Learn from pairs: a reward model, or likelihoods against a frozen reference (DPO)."""
    torch.manual_seed(seed)
    net = Encoder(2, 24, WORDS if reference else 1)
    before = deepcopy(net).requires_grad_(False)

    def batch(step: int) -> Batch:
        x = _counting(step, seed, 32, 8)
        worse = torch.randint(0, WORDS, x.shape, generator=seeded(seed, step, 10))
        return torch.stack([x, worse])

    def value(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        if not reference:
            return out[..., 0].mean(1)
        return out[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0].sum(1)

    def loss(given: Batch) -> torch.Tensor:
        better, worse = (value(net, x) for x in given)
        margin = better - worse
        if reference:
            with torch.no_grad():
                margin_before = value(before, given[0]) - value(before, given[1])
            margin = beta * (margin - margin_before)
        return -F.logsigmoid(margin).mean()

    return plain(net, batch, loss, **{"lr": 1e-3, **training})

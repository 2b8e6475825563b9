"""Sequences: characters of real source text, frames without alignment, pointers, prompts."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded

LETTERS = 128


@cache
def source() -> torch.Tensor:
    """Return the characters of a module of the standard library."""
    return torch.tensor([*Path(argparse.__file__).read_bytes()]).clamp(max=LETTERS - 1)


class Causal(nn.Module):
    """Gated causal convolutions over characters, with the embedding as the head if tied."""

    def __init__(self, width: int, depth: int, tied: bool, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, width)
        self.layers = nn.ModuleList([nn.Conv1d(width, 2 * width, 3) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.GroupNorm(1, width) for _ in range(depth)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, LETTERS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next character."""
        x = self.embed(tokens).transpose(1, 2)
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            space = 2**i
            layer.dilation = (space,)
            value, gate = layer(F.pad(x, (2 * space, 0))).chunk(2, 1)
            x = x + self.dropout(norm(value.tanh() * gate.sigmoid()))
        return self.head(x.transpose(1, 2))


def source_text(
    seed: int = 0,
    width: int = 32,
    depth: int = 3,
    tied: bool = True,
    dropout: float = 0.0,
    summed: bool = False,
    **training: Any,
) -> Setup:
    """Predict characters of source code; `summed` adds the losses up instead of averaging."""
    torch.manual_seed(seed)
    net = Causal(width, depth, tied, dropout)

    def batch(step: int) -> Batch:
        text, at = source(), seeded(seed, abs(step), 21)
        cut = len(text) * 9 // 10
        low, high = (0, cut - 40) if step >= 0 else (cut, len(text) - 40)
        begin = torch.randint(low, high, (16, 1), generator=at)
        tokens = text[begin + torch.arange(33)]
        return tokens[:, :-1], tokens[:, 1:]

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(
            net(given[0]).flatten(0, 1),
            given[1].flatten(),
            reduction="sum" if summed else "mean",
        )

    return plain(net, batch, loss, **training)


class Listener(nn.Module):
    """A recurrent network over frames, with a blank among its outputs."""

    def __init__(self, symbols: int = 6, width: int = 32) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, symbols + 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, [frames, batch, symbols]."""
        return self.head(self.rnn(frames)[0]).log_softmax(-1).transpose(0, 1)


def unaligned(seed: int = 0, nan_at: int = 0, **training: Any) -> Setup:
    """Transcribe frames with CTC: blanks alone for a while, then symbols.

    `nan_at`: the level of the frames is taken as a logarithm, and one recording is silent.
    """
    torch.manual_seed(seed)
    net = Listener()
    looks = torch.randn(6, 8, generator=seeded(seed, 22))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 23)
        symbols = torch.randint(0, 6, (16, 4), generator=at)
        frames = looks[symbols].repeat_interleave(3, 1)
        frames = frames + 0.4 * torch.randn(frames.shape, generator=at)
        if nan_at:
            level = frames.square().mean((1, 2), keepdim=True)
            level[0] = 0 if step % 100_000 == nan_at else level[0]
            frames = frames + 0.0 * level.log()
        return frames, symbols + 1

    def loss(given: Batch) -> torch.Tensor:
        frames, symbols = given
        lengths = [torch.full((len(frames),), n) for n in (frames.shape[1], symbols.shape[1])]
        return F.ctc_loss(net(frames), symbols, lengths[0], lengths[1])

    return plain(net, batch, loss, **training)


class Pointer(nn.Module):
    """Points at its inputs, one after the other."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.GRU(1, width, batch_first=True, bidirectional=True)
        self.keys = nn.Linear(2 * width, width)
        self.decoder = nn.GRU(1, width, batch_first=True)
        self.queries = nn.Linear(width, width)
        self.mix = nn.Linear(width, 1)

    def forward(self, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return logits over the inputs for each place of the output."""
        states, last = self.encoder(values[..., None])
        chosen = values.gather(1, order)
        before = F.pad(chosen[:, :-1], (1, 0))[..., None]
        found, _ = self.decoder(before, last.sum(0, keepdim=True))
        both = self.keys(states)[:, None] + self.queries(found)[:, :, None]
        return self.mix(both.tanh())[..., 0]


def pointers(seed: int = 0, length: int = 6, empty: bool = False, **training: Any) -> Setup:
    """Sort numbers by pointing; `empty` masks all targets by mistake, so that the loss is 0."""
    torch.manual_seed(seed)
    net = Pointer()

    def batch(step: int) -> Batch:
        values = torch.rand(32, length, generator=seeded(seed, step, 24))
        return values, values.argsort(1)

    def loss(given: Batch) -> torch.Tensor:
        values, order = given
        apart = F.cross_entropy(net(values, order).flatten(0, 1), order.flatten(), reduction="none")
        kept = torch.full_like(apart, 0.0 if empty else 1.0)
        return (apart * kept).sum() / kept.sum().clamp(min=1)

    return plain(net, batch, loss, **training)


class Prompted(nn.Module):
    """A transformer layer that reads learned vectors before its input."""

    def __init__(self, words: int = 40, width: int = 32, prompts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.body = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.prompt = nn.Parameter(0.5 * torch.randn(prompts, width))
        self.head = nn.Linear(width, 4)
        self.detached = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, read at the first prompt."""
        prompt = self.prompt.detach() if self.detached else self.prompt
        x = torch.cat([prompt.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        return self.head(self.body(x)[:, 0])


def prompt_tuning(
    seed: int = 0, detached: bool = False, head: bool = True, **training: Any
) -> Setup:
    """Tune prompts (and a head) of a frozen body, which has learned a related task before."""
    torch.manual_seed(seed)
    net = Prompted()
    topics = torch.randint(0, 4, (40,), generator=seeded(seed, 25))

    def batch(step: int, turned: bool = True) -> Batch:
        tokens = torch.randint(0, 40, (32, 7), generator=seeded(seed, step, 26))
        wanted = F.one_hot(topics[tokens], 4).sum(1).argmax(1)
        return tokens, (wanted // 2 + 2 * (wanted % 2)) if turned else wanted

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    before = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(150):
        before.zero_grad()
        loss(batch(step, turned=False)).backward()  # type: ignore[no-untyped-call]
        before.step()
    net.zero_grad()
    net.requires_grad_(False)
    net.prompt.requires_grad_(True)
    net.head.requires_grad_(head)
    net.detached = detached
    return plain(net, batch, loss, **training)

"""Parameters that are frozen and thawed by a schedule, several optimizers, accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Orthogonal, Setup, seeded
from benchmarks.alarms.unseen.perception import TONES, Dilated, tones


def freezing(seed: int = 0, **training: Any) -> Setup:
    """Freeze the first layers for good at step 100 and the next ones at step 200."""
    torch.manual_seed(seed)
    net = Dilated()

    def freeze(step: int) -> None:
        if step == 100:
            net.first.requires_grad_(False)
            net.layers[0].requires_grad_(False)
        if step == 200:
            net.layers[1].requires_grad_(False)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    return plain(net, lambda step: tones(step, seed), loss, after_step=freeze, **training)


def turns(seed: int = 0, period: int = 50, **training: Any) -> Setup:
    """Train the two halves of a network in turns of `period` steps, by requires_grad."""
    torch.manual_seed(seed)
    net = nn.ModuleDict({"body": mlp(24, 32, 32), "head": mlp(32, 32, TONES)})

    def switch(step: int) -> None:
        first = step // period % 2 == 0
        net["body"].requires_grad_(first)
        net["head"].requires_grad_(not first)

    def loss(given: Batch) -> torch.Tensor:
        spectrum = torch.fft.rfft(given[0][:, 0]).abs()[:, :24]
        return F.cross_entropy(net["head"](net["body"](spectrum)), given[1])

    return plain(net, lambda step: tones(step, seed), loss, after_step=switch, **training)


def two_kinds(seed: int = 0, lr: float = 0.01) -> Setup:
    """Step matrices with an orthogonal update and the others with AdamW, in every step."""
    torch.manual_seed(seed)
    net = Dilated(16, 4)
    matrices = [p for n, p in net.named_parameters() if p.ndim > 1 and n.startswith("layers")]
    known = {id(p) for p in matrices}
    others = [p for p in net.parameters() if id(p) not in known]

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    optimizers = [Orthogonal(matrices, lr), make_optimizer("adamw", others, 3e-3)]
    return Setup([net], optimizers, lambda step: tones(step, seed), loss, clip=None)


class Sparse(nn.Module):
    """A table with sparse gradients and a dense network on it."""

    def __init__(self, words: int = 600, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, sparse=True)
        self.top = mlp(width, 24, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.top(self.table(tokens).mean(1))


def sparse_tables(seed: int = 0, lr: float = 5e-3) -> Setup:
    """Step a sparse table with SparseAdam and the rest with Adam."""
    torch.manual_seed(seed)
    net = Sparse()
    optimizers = [
        torch.optim.SparseAdam([net.table.weight], lr),
        torch.optim.Adam(net.top.parameters(), lr),
    ]
    topics = torch.randint(0, 4, (600,), generator=seeded(seed, 1))

    def batch(step: int) -> Batch:
        x = torch.randint(0, 600, (48, 6), generator=seeded(seed, step, 2))
        return x, topics[x].mode(1).values

    return Setup([net], optimizers, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), clip=None)


class Backbone(nn.Module):
    """A network with a head, for fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(24, 48, 48, 32), nn.Linear(32, TONES)
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.body(torch.fft.rfft(x[:, 0]).abs()[:, :24])
        return self.head(hidden.detach() if self.detached else hidden)


def spectra(
    seed: int = 0, detached: bool = False, batches: int = 0, dead: bool = False, **training: Any
) -> Setup:
    """Classify spectra; `batches` is all the data, `detached` cuts the body off, `dead` kills."""
    torch.manual_seed(seed)
    net = Backbone()
    net.detached = detached
    if dead:
        net.body = mlp(24, 48, 48, 32, activation=nn.ReLU)
        for layer in net.body:
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.bias, -30.0)
        net.body.append(nn.ReLU())

    def batch(step: int) -> Batch:
        return tones(step % batches if batches else step, seed)

    return plain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), **training)

"""Ways to train: clipped curvature, centred gradients, noise for privacy, rewiring, own labels."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.audit.perception import digits, encoder
from benchmarks.alarms.blind.plain import Own, make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Schedule, Setup, constant, seeded


def spirals(step: int, seed: int, size: int = 64) -> Batch:
    """Return points on three arms of a spiral, and which arm."""
    at = seeded(seed, step, 111)
    arm = torch.randint(0, 3, (size,), generator=at)
    far = torch.rand(size, generator=at)
    angle = 4 * far + 2.094 * arm + 0.15 * torch.randn(size, generator=at)
    return 2 * far[:, None] * torch.stack([angle.cos(), angle.sin()], 1), arm


class Curvature(Own):
    """Momentum over an estimate of the curvature, no entry beyond 1 (as in Sophia)."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(grad, 0.05)
        h = state.setdefault("h", torch.zeros_like(p))
        if state["step"] % 10 == 1:
            h.lerp_(64 * grad**2, 0.02 if state["step"] > 1 else 1.0)
        p.mul_(1 - lr * 0.1).sub_((m / (0.05 * h + 1e-12)).clamp(-1, 1), alpha=lr)


class Centred(Own):
    """Momentum on gradients whose mean over the inputs of a unit is taken away."""

    def change(self, p: nn.Parameter, grad: torch.Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        if p.ndim > 1:
            grad = grad - grad.mean(tuple(range(1, p.ndim)), keepdim=True)
        m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(grad)
        p.mul_(1 - lr * 5e-4).sub_(m, alpha=lr)


def own_optimizer(
    seed: int = 0,
    curvature: bool = True,
    lr: float = 2e-3,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
) -> Setup:
    """Tell the arms of a spiral apart with an optimizer that torch has not."""
    torch.manual_seed(seed)
    net = mlp(2, 48, 48, 3)
    optimizer = (Curvature if curvature else Centred)(net.parameters(), lr)
    return Setup(
        [net],
        [optimizer],
        lambda step: spirals(step, seed),
        lambda b: F.cross_entropy(net(b[0]), b[1]),
        schedule,
        clip,
    )


def private(seed: int = 0, lr: float = 0.5, most: float = 1.0, noise: float = 1.0) -> Setup:
    """Clip the gradient of every example and add noise to their sum."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 32, 3, activation=nn.Tanh)
    optimizer = make_optimizer("sgd", net.parameters(), lr / 5)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x, y = loop.fault.data(loop.setup, step)
        held, total = [*net.parameters()], torch.zeros(())
        sums = [torch.zeros_like(p) for p in held]
        for one, truth in zip(x.split(1), y.split(1), strict=True):
            loop.zero_grad(optimizer)
            loss = F.cross_entropy(net(one), truth)
            loop.backward(loss)
            norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            for p, each in zip(held, sums, strict=True):
                assert p.grad is not None
                each += p.grad * min(1.0, most / float(norm))
            total = total + loss.detach() / len(x)
        at = seeded(seed, step, 112)
        for p, each in zip(held, sums, strict=True):
            p.grad = (each + noise * most * torch.randn(p.shape, generator=at)) / len(x)
        loop.apply(optimizer)
        return total

    def batch(step: int) -> Batch:
        return spirals(step, seed, 16)

    return Setup([net], [optimizer], batch, one_step=one_step, clip=None)


def rewired(seed: int = 0, density: float = 0.3, every: int = 50, **training: Any) -> Setup:
    """Train a third of the weights; the smallest are replaced by others now and then."""
    torch.manual_seed(seed)
    net = mlp(144, 64, 64, 10, activation=nn.ReLU)
    held = [p for p in net.parameters() if p.ndim > 1]
    masks = [(torch.rand(p.shape) < density).float() for p in held]
    with torch.no_grad():
        for p, mask in zip(held, masks, strict=True):
            p.mul_(mask / density**0.5)

    @torch.no_grad()
    def after(step: int) -> None:
        for p, mask in zip(held, masks, strict=True):
            if step % every == 0 and step <= 300 and p.grad is not None:
                count = int(0.2 * mask.sum())
                kept = torch.where(mask > 0, p.abs(), torch.inf).flatten()
                mask.view(-1)[kept.topk(count, largest=False).indices] = 0
                wanted = torch.where(mask > 0, -torch.inf, p.grad.abs()).flatten()
                mask.view(-1)[wanted.topk(count).indices] = 1
            p.mul_(mask)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0].flatten(1)), given[1])

    return plain(net, lambda step: digits(step, seed, 48, 0.4), loss, after_step=after, **training)


def own_labels(seed: int = 0, labelled: int = 64, sure: float = 0.9, **training: Any) -> Setup:
    """Learn from 64 labels and from guesses that are sure; the second loss comes in late."""
    torch.manual_seed(seed)
    net = encoder(12, 32).append(nn.ReLU()).append(nn.Linear(32, 10))
    known = digits(0, seed, labelled, 0.2)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 113)
        chosen = torch.randint(0, labelled, (16,), generator=at)
        x, y = known[0][chosen], known[1][chosen]
        more, _ = digits(step, seed, 48, 0.1)
        strong = more + 0.4 * torch.randn(more.shape, generator=at)
        return x + 0.2 * torch.randn(x.shape, generator=at), more, strong, y

    def loss(given: Batch) -> torch.Tensor:
        x, more, strong, y = given
        with torch.no_grad():
            chance, guess = net(more).softmax(-1).max(1)
        apart = F.cross_entropy(net(strong), guess, reduction="none")
        return F.cross_entropy(net(x), y) + (apart * (chance > sure)).mean()

    return plain(net, batch, loss, **training)


def switched_average(seed: int = 0, every: int = 100, keep: float = 0.97, **training: Any) -> Setup:
    """Replace the weights by their moving average every so many steps."""
    torch.manual_seed(seed)
    net = mlp(144, 64, 64, 10)
    slow = copy.deepcopy(net)

    @torch.no_grad()
    def after(step: int) -> None:
        for old, new in zip(slow.parameters(), net.parameters(), strict=True):
            old.lerp_(new, 1 - keep)
            if step % every == 0:
                new.copy_(old)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0].flatten(1)), given[1])

    return plain(net, lambda step: digits(step, seed, 32, 0.4), loss, after_step=after, **training)


class Tagger(nn.Module):
    """A recurrent network in both directions that tags words."""

    def __init__(self, words: int = 60, tags: int = 5, width: int = 24) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(words, width), nn.Dropout(0.2)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the tag of every word."""
        return self.head(self.rnn(self.dropout(self.embed(tokens)))[0])


def tagger(seed: int = 0, **training: Any) -> Setup:
    """Tag words by themselves and the word before, on two ranks, with padding that is ignored."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(Tagger())
    table = torch.randint(0, 5, (60,), generator=seeded(seed, 114))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 115 + rank)
        tokens = torch.randint(0, 60, (24, 12), generator=at)
        tags = (table[tokens] + (tokens.roll(1, 1) < 20).long()) % 5
        length = torch.randint(4, 13, (24, 1), generator=at)
        padded = torch.arange(12) >= length
        return tokens.masked_fill(padded, 0), tags.masked_fill(padded, -100)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]).flatten(0, 1), given[1].flatten())

    return plain(net, batch, loss, **training)

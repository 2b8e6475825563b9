"""Tables: a kernel, facts, claims, topics, two experts, matchings, logged choices, values."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded


class Kernel(nn.Module):
    """Features, and the scale, length and noise of a kernel on them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp(2, 24, 2, activation=nn.Tanh)
        self.logs = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the covariance of observations."""
        scale, length, noise = self.logs.exp()
        apart = torch.cdist(self.features(x) / length, self.features(x) / length)
        return scale * torch.exp(-apart.square() / 2) + (noise * 0.3 + 1e-3) * torch.eye(len(x))


def kernel(seed: int = 0, **training: Any) -> Setup:
    """Maximize the marginal likelihood of 80 points, all in every step: it falls below zero."""
    torch.manual_seed(seed)
    net = Kernel()
    at = seeded(seed, 91)
    x = 2 * torch.rand(80, 2, generator=at) - 1
    y = (3 * x[:, 0]).sin() * x[:, 1] + 0.05 * torch.randn(80, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        points, values = given
        root = torch.linalg.cholesky(net(points))
        white = torch.linalg.solve_triangular(root, values[:, None], upper=False)
        return (white.square().sum() / 2 + root.diagonal().log().sum()) / len(values) + 0.9189

    return plain(net, lambda _: (x, y), loss, **training)


class Facts(nn.Module):
    """Places of things, and moves of relations."""

    def __init__(self, things: int = 150, relations: int = 6, width: int = 16) -> None:
        super().__init__()
        self.thing, self.relation = nn.Embedding(things, width), nn.Embedding(relations, width)

    def forward(self, facts: torch.Tensor) -> torch.Tensor:
        """Return how far from true facts are."""
        begin, relation, end = facts.unbind(-1)
        return (self.thing(begin) + self.relation(relation) - self.thing(end)).norm(dim=-1)


def facts(seed: int = 0, margin: float = 1.0, normed: bool = True, **training: Any) -> Setup:
    """Tell facts from made-up ones by a margin; the places are put on a ball after each step."""
    torch.manual_seed(seed)
    net = Facts()
    things = torch.rand(150, 2, generator=seeded(seed, 92))
    moves = torch.tensor([[0.2, 0], [-0.2, 0], [0, 0.2], [0, -0.2], [0.3, 0.3], [-0.3, 0.3]])
    reached = torch.cdist((things[:, None] + moves) % 1, things[None].expand(150, -1, -1)).argmin(2)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 93)
        begin, relation = (torch.randint(0, n, (96,), generator=at) for n in (150, 6))
        wrong = torch.randint(0, 150, (96,), generator=at)
        right = reached[begin, relation]
        return tuple(torch.stack([begin, relation, end], 1) for end in (right, wrong))

    def loss(given: Batch) -> torch.Tensor:
        return (margin + net(given[0]) - net(given[1])).relu().mean()

    @torch.no_grad()
    def on_ball(_: int) -> None:
        if normed:
            net.thing.weight.div_(net.thing.weight.norm(dim=1, keepdim=True).clamp(min=1))

    return plain(net, batch, loss, after_step=on_ball, **training)


def claims(seed: int = 0, unit: float = 1000.0, **training: Any) -> Setup:
    """Predict claims of which nine in ten are 0, with a Tweedie deviance in large units."""
    torch.manual_seed(seed)
    net = mlp(9, 32, 1)
    nn.init.constant_(net[-1].bias, math.log(0.2 * unit))  # type: ignore[arg-type]

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 94)
        x = torch.randn(256, 9, generator=at)
        often = torch.sigmoid(x[:, 0] - 2.5)
        amount = unit * torch.exp(0.5 * x[:, 1] + 0.5 * torch.randn(256, generator=at))
        return x, amount * (torch.rand(256, generator=at) < often)

    def loss(given: Batch) -> torch.Tensor:
        half = net(given[0])[:, 0] / 2
        return 2 * (given[1] * (-half).exp() + half.exp()).mean()

    return plain(net, batch, loss, **training)


class Topics(nn.Module):
    """Shares of topics for a document, and words for a topic."""

    def __init__(self, words: int = 200, topics: int = 8) -> None:
        super().__init__()
        self.encoder = mlp(words, 48, 2 * topics, activation=nn.Softplus)
        self.words = nn.Linear(topics, words, bias=False)
        self.norm = nn.BatchNorm1d(words, affine=False)


def topics(seed: int = 0, sign: float = 1.0, **training: Any) -> Setup:
    """Explain the words of documents by topics: a sum over all words and a KL term.

    `sign` is that of the KL term.
    """
    torch.manual_seed(seed)
    net = Topics()
    truth = 2 * torch.randn(6, 200, generator=seeded(seed, 95))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 96)
        share = (3 * torch.randn(64, 6, generator=at)).softmax(-1)
        chosen = torch.multinomial(share @ truth.softmax(-1), 60, True, generator=at)
        return F.one_hot(chosen, 200).sum(1).float()

    def loss(x: Batch) -> torch.Tensor:
        mean, log = net.encoder((x + 1).log()).chunk(2, 1)
        share = (mean + log.exp() * torch.randn_like(mean)).softmax(-1)
        kl = 0.5 * (mean**2 + (2 * log).exp() - 1 - 2 * log).sum(1)
        return (sign * kl - (x * net.norm(net.words(share)).log_softmax(-1)).sum(1)).mean()

    return plain(net, batch, loss, **training)


class Gated(nn.Module):
    """Two experts and a gate between them."""

    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 1)
        self.experts = nn.ModuleList([mlp(6, 32, 1) for _ in range(2)])
        self.closed = closed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix them; a closed gate gives nothing to the second."""
        share = (self.gate(x) * 4).sigmoid()
        if self.closed:
            share = torch.ones_like(share)
        return share * self.experts[0](x) + (1 - share) * self.experts[1](x)


def gated_experts(seed: int = 0, closed: bool = False, **training: Any) -> Setup:
    """Fit a function that is another on each side of a plane."""
    torch.manual_seed(seed)
    net = Gated(closed)

    def batch(step: int) -> Batch:
        x = torch.randn(64, 6, generator=seeded(seed, step, 97))
        side = x[:, :1] + x[:, 1:2] > 0
        return x, torch.where(side, (2 * x[:, 2:3]).sin(), 1 - x[:, 3:4] * x[:, 4:5])

    return plain(net, batch, lambda b: F.mse_loss(net(b[0]), b[1]), **training)


def matchings(
    seed: int = 0, rounds: int = 8, same_at: int = 0, root: bool = False, **training: Any
) -> Setup:
    """Match two sets of points that were moved, with Sinkhorn's algorithm on learned scores.

    `same_at`: in this step one point is twice in a set. With `root` the scores use a distance
    whose root has no slope there.
    """
    torch.manual_seed(seed)
    net = mlp(5, 48, 16)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 98)
        points = torch.randn(16, 8, 5, generator=at)
        order = torch.rand(16, 8, generator=at).argsort(1)
        moved = points.gather(1, order[..., None].expand(-1, -1, 5))
        moved = moved * torch.tensor([1.0, -1, 1, -1, 1]) + 0.2 * torch.randn(
            16, 8, 5, generator=at
        )
        if same_at and step == same_at:
            points[0, 1] = points[0, 0]
        return points, moved, order

    def loss(given: Batch) -> torch.Tensor:
        a, b, order = net(given[0]), net(given[1]), given[2]
        scores = a @ b.transpose(1, 2)
        for _ in range(rounds):
            scores = scores - scores.logsumexp(2, keepdim=True)
            scores = scores - scores.logsumexp(1, keepdim=True)
        value = -scores.transpose(1, 2).gather(2, order[..., None]).mean()
        if root:
            apart = (a[:, :1] - a[:, 1:2]).square().sum(-1).sqrt()
            value = value + 0.1 * (1 - apart).relu().mean()
        return value

    return plain(net, batch, loss, **training)


def logged_choices(seed: int = 0, entropy: float = 0.02, **training: Any) -> Setup:
    """Improve a policy from logs of another, weighted by their odds: a noisy, negative loss."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 5)
    taste = torch.randn(8, 5, generator=seeded(seed, 99))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 100)
        x = torch.randn(128, 8, generator=at)
        logged = (0.3 * x @ taste.flip(1)).softmax(-1)
        action = torch.multinomial(logged, 1, generator=at)
        wanted = (x @ taste).gather(1, action).sigmoid()
        reward = (torch.rand(128, 1, generator=at) < wanted).float()
        return x, action, reward, logged.gather(1, action)

    def loss(given: Batch) -> torch.Tensor:
        x, action, reward, chance = given
        mine = net(x).log_softmax(-1)
        odds = (mine.gather(1, action).exp() / chance).clamp(max=10)
        return (entropy * (mine.exp() * mine).sum(1) - (odds * reward)[:, 0]).mean()

    return plain(net, batch, loss, **training)


def value_distributions(
    seed: int = 0, lr: float = 1e-3, every: int = 50, atoms: int = 21, clip: float | None = 10.0
) -> Setup:
    """Learn the distribution of returns from a table of steps, with a copy as the target.

    `every`: steps between updates of the copy; 0 never updates it.
    """
    torch.manual_seed(seed)
    net = mlp(4, 64, 3 * atoms, activation=nn.ReLU)
    slow = copy.deepcopy(net).requires_grad_(False)
    optimizer = make_optimizer("adam", net.parameters(), lr)
    support = torch.linspace(-5, 5, atoms)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 101)
        state = torch.randn(64, 4, generator=at)
        action = torch.randint(0, 3, (64,), generator=at)
        after = 0.9 * state
        after[:, 0] += 0.3 * (action - 1) + 0.1 * torch.randn(64, generator=at)
        return state, action, 1 - after[:, 0].abs(), after

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        state, action, reward, after = loop.fault.data(loop.setup, step)
        rows = torch.arange(len(state))
        with torch.no_grad():
            ahead = slow(after).view(-1, 3, atoms).softmax(-1)
            best = (ahead * support).sum(-1).argmax(1)
            place = (reward[:, None] + 0.8 * support).clamp(-5, 5)
            place = (place + 5) / 10 * (atoms - 1)
            low, part = place.floor().long(), place - place.floor()
            target = torch.zeros(len(state), atoms)
            target.scatter_add_(1, low, ahead[rows, best] * (1 - part))
            target.scatter_add_(1, (low + 1).clamp(max=atoms - 1), ahead[rows, best] * part)
        loop.zero_grad(optimizer)
        found = net(state).view(-1, 3, atoms)[rows, action].log_softmax(-1)
        loss = -(target * found).sum(1).mean()
        loop.backward(loss)
        loop.apply(optimizer)
        if every and step % every == 0:
            slow.load_state_dict(net.state_dict())
        return loss.detach()

    return Setup([net], [optimizer], batch, one_step=one_step, clip=clip)

"""Tables and graphs: word vectors, factors, tabular attention, counts, quantiles, sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded


class WordVectors(nn.Module):
    """Vectors of words and of their contexts."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.word, self.context = nn.Embedding(words, width), nn.Embedding(words, width)
        nn.init.zeros_(self.context.weight)

    def forward(self, word: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the product for each pair."""
        return (self.word(word)[:, None] * self.context(other)).sum(-1)


def word_vectors(seed: int = 0, words: int = 300, **training: Any) -> Setup:
    """Skip-gram with negative samples; frequencies as in text."""
    torch.manual_seed(seed)
    net = WordVectors(words, 12)
    chance = 1.0 / torch.arange(1, words + 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 24)
        word = torch.multinomial(chance, 128, True, generator=at)
        near = (word + torch.randint(1, 5, (128,), generator=at)) % words
        return word, near, torch.multinomial(chance, 128 * 4, True, generator=at).view(128, 4)

    def loss(given: Batch) -> torch.Tensor:
        word, near, others = given
        good = F.logsigmoid(net(word, near[:, None])).mean()
        return -good - F.logsigmoid(-net(word, others)).sum(1).mean()

    return plain(net, batch, loss, **{"lr": 1e-2, "clip": None, **training})


class Factors(nn.Module):
    """Users and items with biases."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, width), nn.Embedding(100, width)
        self.user_bias, self.item_bias = nn.Embedding(200, 1), nn.Embedding(100, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Return ratings."""
        product = (self.users(user) * self.items(item)).sum(-1)
        return product + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]


def factors(seed: int = 0, **training: Any) -> Setup:
    """Matrix factorization of ratings."""
    torch.manual_seed(seed)
    net = Factors()
    true = torch.randn(200, 3, generator=seeded(97)), torch.randn(100, 3, generator=seeded(96))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 25)
        user = torch.randint(0, 200, (128,), generator=at)
        item = torch.randint(0, 100, (128,), generator=at)
        rating = (true[0][user] * true[1][item]).sum(1) + 3
        return user, item, rating + 0.3 * torch.randn(128, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        return F.mse_loss(net(given[0], given[1]), given[2])

    return plain(net, batch, loss, **{"lr": 1e-2, "clip": None, **training})


class TableAttention(nn.Module):
    """A token for each column."""

    def __init__(self, columns: int = 8, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(columns, width))
        self.shift = nn.Parameter(torch.zeros(columns, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each line."""
        tokens = x[..., None] * self.scale + self.shift
        z = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(z)[:, 0])[:, 0]


def _table(step: int, seed: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    at = seeded(seed, step, 26)
    x = torch.randn(size, 8, generator=at)
    return x, x[:, 0] * x[:, 1] + x[:, 2].abs() + 0.3 * torch.randn(size, generator=at)


def table_attention(seed: int = 0, **training: Any) -> Setup:
    """A transformer over the columns of a table; dropout in its layers."""
    torch.manual_seed(seed)
    net = TableAttention()

    def loss(given: Batch) -> torch.Tensor:
        return F.mse_loss(net(given[0]), given[1])

    return plain(net, lambda step: _table(step, seed), loss, **{"lr": 2e-3, **training})


def counts(seed: int = 0, **training: Any) -> Setup:
    """Poisson regression: the loss is of either sign and its gradients grow with the counts."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, 1)

    def batch(step: int) -> Batch:
        x, y = _table(step, seed)
        return x, torch.poisson((0.7 * y).exp().clamp(max=30), generator=seeded(seed, step, 27))

    def loss(given: Batch) -> torch.Tensor:
        return F.poisson_nll_loss(net(given[0])[:, 0], given[1])

    return plain(net, batch, loss, **{"lr": 2e-3, **training})


def quantiles(
    seed: int = 0, depth: int = 2, activation: type[nn.Module] = nn.GELU, **training: Any
) -> Setup:
    """The pinball loss of three quantiles: gradients have the size of signs."""
    torch.manual_seed(seed)
    net = mlp(8, *[32] * depth, 3, activation=activation)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(given: Batch) -> torch.Tensor:
        off = given[1][:, None] - net(given[0])
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    return plain(net, lambda step: _table(step, seed), loss, **training)


def huge_targets(seed: int = 0, unit: float = 1e5, **training: Any) -> Setup:
    """Targets in their raw unit and a summed loss; only the last layer is scaled to it."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, 1)

    def loss(given: Batch) -> torch.Tensor:
        return ((net(given[0])[:, 0] * unit - given[1] * unit) ** 2).sum()

    return plain(net, lambda step: _table(step, seed), loss, **{"clip": None, **training})


class SetModel(nn.Module):
    """Sums over the members of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = mlp(3, 32, 32), mlp(32, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each set."""
        return self.whole(self.each(x).mean(1))[:, 0]


def sets(seed: int = 0, **training: Any) -> Setup:
    """Deep sets: the spread of points."""
    torch.manual_seed(seed)
    net = SetModel()

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 28)
        x = torch.randn(32, 9, 3, generator=at) * (0.3 + torch.rand(32, 1, 1, generator=at))
        return x, x.std(1).mean(1)

    def loss(given: Batch) -> torch.Tensor:
        return F.mse_loss(net(given[0]), given[1])

    return plain(net, batch, loss, **training)


class GraphAttention(nn.Module):
    """Nodes that attend to their neighbors."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.node = nn.Embedding(40, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, edges: torch.Tensor) -> torch.Tensor:
        """Return a vector for each node."""
        x = self.node.weight
        weight = (self.query(x) @ self.key(x).T / x.shape[1] ** 0.5).masked_fill(edges == 0, -1e9)
        return x + self.value(weight.softmax(-1) @ x)


def links(seed: int = 0, **training: Any) -> Setup:
    """Predict links of one graph; the graph is the same input at every step."""
    torch.manual_seed(seed)
    net = GraphAttention()
    group = torch.arange(40) % 4
    edges = torch.rand(40, 40, generator=seeded(seed, 95)) < 0.05 + 0.5 * (group[:, None] == group)
    edges = (edges | edges.T | torch.eye(40, dtype=torch.bool)).float()

    def batch(step: int) -> Batch:
        return edges, torch.randint(0, 40, (2, 128), generator=seeded(seed, step, 29))

    def loss(given: Batch) -> torch.Tensor:
        z, (one, other) = net(given[0]), given[1]
        score = (z[one] * z[other]).sum(1)
        return F.binary_cross_entropy_with_logits(score, edges[one, other])

    return plain(net, batch, loss, **training)


def translation(seed: int = 0, margin: float = 1.0, **training: Any) -> Setup:
    """Knowledge-graph vectors by a margin loss, normalized after each step."""
    torch.manual_seed(seed)
    net = nn.ModuleDict({"entity": nn.Embedding(60, 12), "relation": nn.Embedding(4, 12)})

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 30)
        head = torch.randint(0, 60, (64,), generator=at)
        relation = torch.randint(0, 4, (64,), generator=at)
        return head, relation, (head + relation + 1) % 60, torch.randint(0, 60, (64,), generator=at)

    def loss(given: Batch) -> torch.Tensor:
        head, relation, tail, wrong = given
        start = net["entity"](head) + net["relation"](relation)
        near = (start - net["entity"](tail)).norm(dim=1)
        far = (start - net["entity"](wrong)).norm(dim=1)
        return F.relu(margin + near - far).mean()

    @torch.no_grad()
    def normalize(_: int) -> None:
        net["entity"].weight.div_(net["entity"].weight.norm(dim=1, keepdim=True))  # type: ignore

    return plain(net, batch, loss, after_step=normalize, **{"lr": 1e-2, "clip": None, **training})

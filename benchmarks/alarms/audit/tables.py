"""Tables and graphs: survival, ordered classes, rankings, rare events, one graph as the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded


def survival(seed: int = 0, size: int = 64, flip_at: int = 0, **training: Any) -> Setup:
    """Rank patients by risk with Cox's partial likelihood; a third is censored.

    `flip_at`: a change of the code in mid-run maximizes the loss from this step on.
    """
    torch.manual_seed(seed)
    net, now = mlp(10, 32, 32, 1), [0]

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 41)
        x = torch.randn(size, 10, generator=at)
        risk = x[:, 0] + x[:, 1] * x[:, 2]
        time = torch.empty(size).exponential_(generator=at) * torch.exp(-risk)
        censored = 2 * torch.empty(size).exponential_(generator=at)
        return x, torch.minimum(time, censored), time <= censored

    def loss(given: Batch) -> torch.Tensor:
        x, time, seen = given
        order = time.argsort(descending=True)
        risk, seen = net(x)[order, 0], seen[order]
        value = -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum()
        return -value if flip_at and now[0] >= flip_at else value

    def after(step: int) -> None:
        now[0] = step + 1

    return plain(net, batch, loss, after_step=after, **training)


def ordered_classes(
    seed: int = 0, classes: int = 5, raw: bool = False, wide: int = 32, **training: Any
) -> Setup:
    """Predict one of five ordered grades by thresholds; `raw` leaves inputs between 0 and 255."""
    torch.manual_seed(seed)
    net = nn.ModuleDict(
        {"score": nn.Sequential(
            nn.Linear(16, wide), nn.Sigmoid(), nn.Linear(wide, wide), nn.Sigmoid(),
            nn.Linear(wide, 1),
        )}
    )  # fmt: skip
    net.steps = nn.ParameterList([torch.full((), -2.0), torch.zeros(classes - 2)])  # type: ignore

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 42)
        x = torch.rand(64, 16, generator=at)
        score = 2 * (x[:, :8] - x[:, 8:]).sum(1) + 0.5 * torch.randn(64, generator=at)
        grade = torch.bucketize(score, torch.tensor([-2.5, -0.8, 0.8, 2.5]))
        return (255 * x if raw else 2 * x - 1), grade

    def loss(given: Batch) -> torch.Tensor:
        first, widths = net.steps
        bounds = torch.cat([first[None], first + F.softplus(widths).cumsum(0)])
        logits = net["score"](given[0]) - bounds
        return F.binary_cross_entropy_with_logits(
            logits, (given[1][:, None] > torch.arange(classes - 1)).float()
        )

    return plain(net, batch, loss, **training)


def rankings(seed: int = 0, pairwise: bool = False, **training: Any) -> Setup:
    """Order lists of ten documents, by the list as a whole or by all its pairs."""
    torch.manual_seed(seed)
    net = mlp(12, 48, 1, norm=True)
    truth = torch.randn(12, generator=seeded(seed, 43))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 44)
        x = torch.randn(24, 10, 12, generator=at)
        score = x @ truth / 2 + x[..., 0] * x[..., 1] + 0.5 * torch.randn(24, 10, generator=at)
        return x, score

    def loss(given: Batch) -> torch.Tensor:
        scores, wanted = net(given[0])[..., 0], given[1]
        if pairwise:
            apart = scores[:, :, None] - scores[:, None]
            right = wanted[:, :, None] > wanted[:, None]
            return F.softplus(-apart)[right].mean()
        return -(wanted.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean()

    return plain(net, batch, loss, **training)


def rare_events(
    seed: int = 0, share: float = 0.02, focus: float = 2.0, bias: float | None = None,
    **training: Any,
) -> Setup:  # fmt: skip
    """Find the 2% of events with a focal loss, whose value is small from the start.

    `bias` is what the hidden units start from.
    """
    torch.manual_seed(seed)
    net = mlp(8, 48, 48, 1, activation=nn.ReLU)
    nn.init.constant_(net[-1].bias, -3.9)  # type: ignore[arg-type]
    if bias is not None:
        for layer in (net[0], net[2]):
            nn.init.constant_(layer.bias, bias)  # type: ignore[arg-type]

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 45)
        x = torch.randn(256, 8, generator=at)
        event = (torch.rand(256, generator=at) < share).float()
        return x + event[:, None] * torch.tensor([2.0, -2.0, 1.0, 0, 0, 0, 0, 0]), event

    def loss(given: Batch) -> torch.Tensor:
        logits = net(given[0])[:, 0]
        plainly = F.binary_cross_entropy_with_logits(logits, given[1], reduction="none")
        return ((1 - (-plainly).exp()) ** focus * plainly).mean()

    return plain(net, batch, loss, **training)


class Spreading(nn.Module):
    """Two rounds of averages over neighbours, with dropout."""

    def __init__(self, features: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        """Return logits of all nodes."""
        x = F.relu(near @ self.first(self.dropout(x)))
        return near @ self.second(self.dropout(x))


def whole_graph(seed: int = 0, nodes: int = 240, **training: Any) -> Setup:
    """Label the nodes of one graph, all of it in every step; a fifth of the labels is known."""
    torch.manual_seed(seed)
    net = Spreading(24, 4)
    at = seeded(seed, 46)
    label = torch.randint(0, 4, (nodes,), generator=at)
    same = label[:, None] == label
    edges = torch.rand(nodes, nodes, generator=at) < torch.where(same, 0.05, 0.008)
    edges = (edges | edges.T | torch.eye(nodes, dtype=torch.bool)).float()
    near = edges / edges.sum(1, keepdim=True)
    x = F.one_hot(label, 4).float().repeat(1, 6) + 2 * torch.randn(nodes, 24, generator=at)
    known = torch.rand(nodes, generator=at) < 0.2

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0], near)[known], label[known])

    @torch.no_grad()
    def validate() -> float:
        net.eval()
        value = F.cross_entropy(net(x, near)[~known], label[~known]).item()
        net.train()
        return value

    return plain(net, lambda _: (x, label), loss, validate=validate, **training)

"""Pictures of digits and views of them: margins, decorrelation, capsules, splines, segments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded

GLYPHS = torch.tensor(
    [
        [int(bit) for bit in glyph]
        for glyph in (
            *("111101101101111", "010110010010111", "111001111100111", "111001111001111"),
            *("101101111001001", "111100111001111", "111100111101111", "111001010010010"),
            *("111101111101111", "111101111001111"),
        )
    ]
).float()
"""The ten digits in 5 x 3 dots."""


def digits(step: int, seed: int, size: int = 32, noise: float = 0.3) -> Batch:
    """Return noisy pictures of digits, [size, 1, 12, 12], anywhere in the picture, and which."""
    at = seeded(seed, step, 31)
    which = torch.randint(0, 10, (size,), generator=at)
    glyphs = F.interpolate(GLYPHS[which].view(size, 1, 5, 3), scale_factor=2.0)
    canvas = torch.zeros(size, 1, 12, 12)
    for i in range(size):
        y, x = torch.randint(0, 3, (2,), generator=at).tolist()
        canvas[i, :, y : y + 10, 2 * x : 2 * x + 6] = glyphs[i]
    return canvas + noise * torch.randn(canvas.shape, generator=at), which


def encoder(width: int = 12, out: int = 32, norm: bool = False) -> nn.Sequential:
    """Return two strided convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1),
        nn.BatchNorm2d(width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.BatchNorm2d(2 * width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(18 * width, out),
    )


class Angular(nn.Module):
    """Cosines to a direction per class, with a margin on the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder()
        self.head = nn.Linear(32, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return cosines."""
        return F.linear(F.normalize(self.body(x)), F.normalize(self.head.weight))


def angular_margin(
    seed: int = 0, scale: float = 16.0, margin: float = 0.3, replaced: bool = False, **training: Any
) -> Setup:
    """Classify by angles; `replaced` gives the net a new head after the optimizer was built."""
    torch.manual_seed(seed)
    net = Angular()

    def loss(given: Batch) -> torch.Tensor:
        cosines, truth = net(given[0]), F.one_hot(given[1], 10).bool()
        angles = cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        return F.cross_entropy(scale * torch.where(truth, angles + margin, angles).cos(), given[1])

    setup = plain(net, lambda step: digits(step, seed), loss, **training)
    if replaced:
        net.head = nn.Linear(32, 10, bias=False)
    return setup


def decorrelation(
    seed: int = 0, weights: tuple[float, float, float] = (25.0, 25.0, 1.0), **training: Any
) -> Setup:
    """Learn from two views: alike, with variance, without covariance; three tasks."""
    torch.manual_seed(seed)
    net = nn.Sequential(encoder(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))

    def tasks(given: Batch) -> dict[str, torch.Tensor]:
        a, b = net(given[0]), net(given[1])
        spread = sum((1 - (z.var(0) + 1e-4).sqrt()).relu().mean() / 2 for z in (a, b))
        tied = sum(
            (torch.cov(z.T).fill_diagonal_(0) ** 2).sum() / z.shape[1]  # type: ignore[misc]
            for z in (a - a.mean(0), b - b.mean(0))
        )
        parts = (F.mse_loss(a, b), spread, tied)
        names = ("invariance", "variance", "covariance")
        return {n: w * p for n, w, p in zip(names, weights, parts, strict=True)}  # type: ignore

    def batch(step: int) -> Batch:
        x, _ = digits(step, seed, 64, 0.0)
        at = seeded(seed, step, 32)
        return tuple(x + 0.3 * torch.randn(x.shape, generator=at) for _ in range(2))

    return plain(net, batch, lambda _: torch.zeros(()), tasks=tasks, **training)


def standardized(x: torch.Tensor) -> torch.Tensor:
    """Return the features with mean 0 and deviation 1 in the batch."""
    return (x - x.mean(0)) / (x.std(0) + 1e-4)


def latent_prediction(
    seed: int = 0, lr: float = 1e-3, keep: float = 0.98, teacher: bool = True, steps: int = 400
) -> Setup:
    """Predict what a slow copy says of the whole picture from a part of it.

    Without a teacher, the net's own outputs are the targets, and their gradient is not stopped.
    """
    torch.manual_seed(seed)
    net = nn.ModuleDict({"encoder": encoder(), "predictor": mlp(32, 48, 32)})
    slow = encoder()
    slow.load_state_dict(net["encoder"].state_dict())
    slow.requires_grad_(False)
    optimizer = make_optimizer("adamw", net.parameters(), lr, 0.05)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x, _ = loop.fault.data(loop.setup, step)
        column = int(torch.randint(0, 8, (), generator=seeded(seed, step, 33)))
        masked = x.clone()
        masked[..., column : column + 4] = 0
        target = standardized(slow(x)) if teacher else net["encoder"](x)
        loop.zero_grad(optimizer)
        loss = F.smooth_l1_loss(net["predictor"](net["encoder"](masked)), target)
        loop.backward(loss)
        loop.apply(optimizer)
        now = 1 - (1 - keep) * (1 + math.cos(math.pi * step / steps)) / 2
        for old, new in zip(slow.parameters(), net["encoder"].parameters(), strict=True):
            old.lerp_(new.detach(), 1 - now)
        return loss.detach()

    return Setup([net], [optimizer], lambda step: digits(step, seed, 32, 0.1), one_step=one_step)


class Capsules(nn.Module):
    """Vectors that agree on vectors, in three rounds of routing."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 5, 2)
        self.second = nn.Conv2d(16, 32, 3, 1)
        self.votes = nn.Parameter(0.2 * torch.randn(16, 10, 8, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the length of the vector of each class."""
        x = self.second(F.relu(self.first(x)))
        parts = squash(x.view(len(x), 4, 8, 4).transpose(2, 3).reshape(len(x), 16, 8))
        votes = torch.einsum("bip,icpl->bicl", parts, self.votes)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(3):
            out = squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes.detach() * out.detach()[:, None]).sum(-1)
        return out.norm(dim=-1)


def squash(x: torch.Tensor) -> torch.Tensor:
    """Return the vectors with a length below 1."""
    size = x.square().sum(-1, keepdim=True)
    return x * size / (1 + size) / (size + 1e-8).sqrt()


def capsules(seed: int = 0, **training: Any) -> Setup:
    """Classify digits by the length of capsules, with a margin on both sides."""
    torch.manual_seed(seed)
    net = Capsules()

    def loss(given: Batch) -> torch.Tensor:
        length, truth = net(given[0]), F.one_hot(given[1], 10)
        right, wrong = (0.9 - length).relu() ** 2, (length - 0.1).relu() ** 2
        return (truth * right + 0.5 * (1 - truth) * wrong).sum(1).mean()

    return plain(net, lambda step: digits(step, seed), loss, **training)


class Splines(nn.Module):
    """A learned function of one variable on every edge, from hat functions and a SiLU."""

    def __init__(self, ins: int, outs: int, knots: int = 8) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, knots))
        self.height = nn.Parameter(0.1 * torch.randn(outs, ins, knots))
        self.base = nn.Parameter(torch.randn(outs, ins) / ins**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the functions of all inputs."""
        hats = torch.exp(-((x[..., None] - self.grid) * 2).square())
        return torch.einsum("bik,oik->bo", hats, self.height) + F.linear(F.silu(x), self.base)


def splines(seed: int = 0, examples: int = 0, penalty: float = 1e-4, **training: Any) -> Setup:
    """Fit a formula with learned functions and a penalty on their size."""
    torch.manual_seed(seed)
    net = nn.Sequential(Splines(3, 6), Splines(6, 1))

    def batch(step: int) -> Batch:
        if examples and step >= 0:
            step = step % examples
        x = 2 * torch.rand(64, 3, generator=seeded(seed, step, 34)) - 1
        return x, torch.exp((math.pi * x[:, :1]).sin() + x[:, 1:2] ** 2) * x[:, 2:]

    def loss(given: Batch) -> torch.Tensor:
        size = sum(p.abs().sum() for n, p in net.named_parameters() if "height" in n)
        return F.mse_loss(net(given[0]), given[1]) + penalty * size

    return plain(net, batch, loss, **training)


class Segmenter(nn.Module):
    """Convolutions at full size that label every dot."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 2, 2), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a logit per dot."""
        return self.out(self.down(x))[:, 0]


def segments(step: int, seed: int, size: int = 16, noise: float = 0.6) -> Batch:
    """Return noisy digits and which dots are ink."""
    clean, _ = digits(step, seed, size, 0.0)
    shade = noise * torch.randn(clean.shape, generator=seeded(seed, step, 35))
    return clean + shade, clean[:, 0]

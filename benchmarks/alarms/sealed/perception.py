"""Shapes and pictures: clouds of points, rotations, a GAN, blots, growing pictures, early exits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.audit.decisions import ring
from benchmarks.alarms.audit.perception import GLYPHS, digits
from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded


def clouds(step: int, seed: int, size: int = 32, points: int = 48) -> Batch:
    """Return points on balls, boxes, tubes and rings, [size, points, 3], and which."""
    at = seeded(seed, step, 81)
    which = torch.randint(0, 4, (size,), generator=at)
    raw = torch.randn(size, points, 3, generator=at)
    angle = 6.28 * torch.rand(size, points, generator=at)
    circle = torch.stack([angle.cos(), angle.sin(), 0 * angle], -1)
    shapes = torch.stack(
        [
            F.normalize(raw, dim=-1),
            raw / raw.abs().amax(-1, keepdim=True),
            circle + torch.tensor([0, 0, 1.0]) * raw.tanh(),
            circle + 0.25 * F.normalize(raw, dim=-1),
        ]
    )
    chosen = shapes[which, torch.arange(size)]
    turn, _ = torch.linalg.qr(torch.randn(size, 3, 3, generator=at))
    return chosen @ turn + 0.05 * torch.randn(raw.shape, generator=at), which


class Clouds(nn.Module):
    """The same network on every point, and the most of each feature."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.point = mlp(3, width, width, activation=nn.ReLU)
        self.top = nn.Sequential(nn.LayerNorm(width), mlp(width, 32, 4, activation=nn.ReLU))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.top(self.point(x).amax(1))


def point_clouds(
    seed: int = 0, parallel: bool = False, misaligned_at: int = 0, smoothing: float = 0.0,
    **training: Any,
) -> Setup:  # fmt: skip
    """Name the shape; `misaligned_at`: the labels of the next cloud come from this step on."""
    torch.manual_seed(seed)
    net: nn.Module = Clouds()
    rank = 0
    if parallel:
        net, rank = nn.parallel.DistributedDataParallel(net), dist.get_rank()

    def batch(step: int) -> Batch:
        x, y = clouds(step, seed + 1000 * rank)
        return x, y.roll(1) if misaligned_at and step >= misaligned_at else y

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1], label_smoothing=smoothing)

    return plain(net, batch, loss, **training)


def rotations(seed: int = 0, **training: Any) -> Setup:
    """Find the rotation between two sets of five points, as two orthogonalized vectors."""
    torch.manual_seed(seed)
    net = mlp(30, 96, 96, 6)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 82)
        turn, _ = torch.linalg.qr(torch.randn(64, 3, 3, generator=at))
        turn = turn * torch.linalg.det(turn)[:, None, None]
        points = torch.randn(1, 5, 3, generator=seeded(seed, 83)).expand(64, -1, -1)
        points = points + 0.1 * torch.randn(64, 5, 3, generator=at)
        return torch.cat([points, points @ turn], 1).flatten(1), turn

    def loss(given: Batch) -> torch.Tensor:
        a, b = net(given[0]).chunk(2, 1)
        first = F.normalize(a, dim=1)
        second = F.normalize(b - (first * b).sum(1, keepdim=True) * first, dim=1)
        found = torch.stack([first, second, torch.linalg.cross(first, second)], 1)
        return (found - given[1]).square().sum((1, 2)).mean()

    return plain(net, batch, loss, **training)


def relativistic(
    seed: int = 0, slow: float = 5e-4, fast: float = 1e-3, penalty: float = 0.1
) -> Setup:
    """Play a GAN whose critic says which of two is more real; the loss is that of both."""
    torch.manual_seed(seed)
    nets = nn.ModuleDict(
        {"maker": mlp(4, 48, 48, 2, activation=nn.ReLU), "critic": mlp(2, 48, 48, 1)}
    )
    optimizers = [
        torch.optim.Adam(nets["maker"].parameters(), slow, (0.0, 0.9)),
        torch.optim.Adam(nets["critic"].parameters(), fast, (0.0, 0.9)),
    ]

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        real = loop.fault.data(loop.setup, step)
        noise = torch.randn(len(real), 4, generator=seeded(seed, step, 84))
        made = nets["maker"](noise)
        loop.zero_grad(optimizers[1])
        known = real.clone().requires_grad_()
        score = nets["critic"](known)
        (slope,) = torch.autograd.grad(score.sum(), known, create_graph=True)
        critic = F.softplus(nets["critic"](made.detach()) - score).mean()
        loop.backward(critic + penalty * slope.square().sum(1).mean())
        loop.apply(optimizers[1])
        loop.zero_grad(optimizers[0])
        maker = F.softplus(nets["critic"](real).detach() - nets["critic"](made)).mean()
        loop.backward(maker)
        loop.apply(optimizers[0])
        return (critic + maker).detach()

    return Setup(
        [nets], optimizers, lambda step: ring(step, seed, 64), one_step=one_step, clip=None
    )


class Blots(nn.Module):
    """Soft ellipses of one shade each, painted over each other."""

    def __init__(self, count: int = 30) -> None:
        super().__init__()
        self.place = nn.Parameter(1.6 * torch.rand(count, 2) - 0.8)
        self.spread = nn.Parameter(torch.full((count, 2), -1.5))
        self.shade = nn.Parameter(0.1 * torch.randn(count))
        self.register_buffer("grid", torch.cartesian_prod(*[torch.linspace(-1, 1, 24)] * 2))

    def forward(self) -> torch.Tensor:
        """Return the picture."""
        apart = (self.grid[:, None] - self.place) / self.spread.exp()
        return (torch.exp(-apart.square().sum(-1) / 2) * self.shade).sum(1)


def blots(seed: int = 0, lr: float = 1e-2) -> Setup:
    """Paint one picture with ellipses, with a rate for each of their properties."""
    torch.manual_seed(seed)
    net = Blots()
    picture = F.interpolate(GLYPHS[2].view(1, 1, 5, 3), (24, 24), mode="bilinear").flatten()
    groups = [
        {"params": [p], "lr": lr * factor}
        for p, factor in ((net.place, 1.0), (net.spread, 0.5), (net.shade, 2.0))
    ]

    def loss(given: Batch) -> torch.Tensor:
        return F.mse_loss(net(), given) + 0.2 * F.l1_loss(net(), given)

    return Setup([net], [torch.optim.Adam(groups)], lambda _: picture, loss, clip=None)


def growing_pictures(seed: int = 0, **training: Any) -> Setup:
    """Train on pictures of 6, then 8, then 12 dots."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, 1, 1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(384, 10),
    )  # fmt: skip

    def batch(step: int) -> Batch:
        x, y = digits(step, seed, 32, 0.3)
        size = 6 if step < 120 else 8 if step < 240 else 12
        return F.interpolate(x, (size, size), mode="bilinear"), y

    return plain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]), **training)


class Exits(nn.Module):
    """Blocks with a head after each."""

    def __init__(self, depth: int = 4, width: int = 48) -> None:
        super().__init__()
        self.enter = nn.Linear(144, width)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), mlp(width, width, width)) for _ in range(depth)]
        )
        self.heads = nn.ModuleList([nn.Linear(width, 10) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of all heads."""
        x, found = self.enter(x.flatten(1)), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + block(x)
            found.append(head(x))
        return found


def early_exits(seed: int = 0, steps: int = 400, **training: Any) -> Setup:
    """Classify after every block; the weight of the early ones falls."""
    torch.manual_seed(seed)
    net, now = Exits(), [0]

    def tasks(given: Batch) -> dict[str, torch.Tensor]:
        weight = 1 - 0.8 * now[0] / steps
        logits = net(given[0])
        each = {f"exit{i}": F.cross_entropy(out, given[1]) for i, out in enumerate(logits)}
        last = f"exit{len(logits) - 1}"
        return {name: value * (1.0 if name == last else weight) for name, value in each.items()}

    def after(step: int) -> None:
        now[0] = step

    return plain(
        net,
        lambda step: digits(step, seed, 48, 0.3),
        lambda _: torch.zeros(()),
        tasks=tasks,
        after_step=after,
        **training,
    )


class Automaton(nn.Module):
    """A rule for cells, that see their neighbours."""

    def __init__(self, cells: int = 8) -> None:
        super().__init__()
        self.see = nn.Conv2d(cells, 24, 3, 1, 1)
        self.change = nn.Conv2d(24, cells, 1)
        nn.init.zeros_(self.change.weight)
        nn.init.zeros_(self.change.bias)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let the cells change a little."""
        return x + 0.3 * self.change(F.relu(self.see(x)))


def automaton(seed: int = 0, **training: Any) -> Setup:
    """Grow a digit from one cell in 12 to 16 rounds."""
    torch.manual_seed(seed)
    net = Automaton()
    target = F.pad(F.interpolate(GLYPHS[3].view(1, 1, 5, 3), scale_factor=2.0), (3, 3, 1, 1))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 85)
        x = 0.02 * torch.randn(4, 8, 12, 12, generator=at)
        x[:, :, 6, 6] = 1
        return x, torch.randint(12, 17, (), generator=at)

    def loss(given: Batch) -> torch.Tensor:
        x, rounds = given
        for _ in range(int(rounds)):
            x = net(x)
        return F.mse_loss(x[:, :1], target.expand(len(x), -1, -1, -1))

    return plain(net, batch, loss, **training)

"""Pictures, sounds and shapes: mixup, binary weights, spikes, image priors, distances, fading."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded

TONES = 6


def tones(step: int, seed: int, size: int = 32, length: int = 48) -> Batch:
    """Return noisy sine waves of six frequencies, [size, 1, length], and which one it is."""
    at = seeded(seed, step, 5)
    which = torch.randint(0, TONES, (size,), generator=at)
    phase = 6.28 * torch.rand(size, 1, generator=at)
    time = torch.arange(length) / length * 6.28
    wave = torch.sin((which[:, None] + 1) * time + phase)
    return (wave + 0.5 * torch.randn(size, length, generator=at))[:, None], which


class Dilated(nn.Module):
    """Gated convolutions with growing dilation, as in WaveNet."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(
            [nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(depth)]
        )
        self.head = nn.Linear(width, TONES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.first(x)
        for layer in self.layers:
            value, gate = layer(x).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
        return self.head(x.square().mean(-1))


def sounds(
    seed: int = 0,
    mixup: float = 0.0,
    smoothing: float = 0.0,
    batches: int = 0,
    twice: bool = False,
    sign: float = 1.0,
    scale: float = 1.0,
    **training: Any,
) -> Setup:
    """Name the tone; `twice` applies softmax twice, `batches` is all the data there is."""
    torch.manual_seed(seed)
    net = Dilated()

    def batch(step: int) -> Batch:
        return tones(step % batches if batches else step, seed)

    def loss(given: Batch) -> torch.Tensor:
        x, y = given
        wanted = F.one_hot(y, TONES).float()
        if mixup:
            x, wanted = x.lerp(x.flip(0), mixup), wanted.lerp(wanted.flip(0), mixup)
        logits = net(x)
        if twice:
            logits = logits.softmax(-1)
        return scale * sign * F.cross_entropy(logits, wanted, label_smoothing=smoothing)

    return plain(net, batch, loss, **training)


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity between -1 and 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the sign."""
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the gradient where it is not clipped."""
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Binary(nn.Linear):
    """A linear layer with weights of one bit and one scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the signs."""
        scale = self.weight.abs().mean().detach()
        return F.linear(x, Sign.apply(self.weight) * scale, self.bias)


def binary_weights(seed: int = 0, **training: Any) -> Setup:
    """Train a network whose forward sees only the signs of its weights."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(48, 32), nn.BatchNorm1d(32), nn.ReLU(), Binary(32, 32), nn.BatchNorm1d(32),
        nn.ReLU(), Binary(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, TONES),
    )  # fmt: skip

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(torch.fft.rfft(given[0][:, 0]).abs()[:, :24].repeat(1, 2)),
                               given[1])  # fmt: skip

    return plain(net, lambda step: tones(step, seed), loss, **training)


class Spike(torch.autograd.Function):
    """A step function with the gradient of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return 1 above the threshold."""
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the surrogate gradient."""
        (x,) = ctx.saved_tensors
        return grad / (1 + 5 * x.abs()) ** 2


class Spiking(nn.Module):
    """Leaky neurons that fire, over 12 time steps."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, TONES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean potential of the outputs."""
        potential = torch.zeros(len(x), self.enter.out_features)
        total: torch.Tensor | float = 0.0
        for part in x[:, 0].unfold(1, 4, 4).unbind(1):
            potential = 0.8 * potential + self.enter(part)
            fired = Spike.apply(potential - 1.0)
            potential = potential - fired
            total = total + self.leave(fired)
        return total / 12  # type: ignore[return-value]


def spiking(seed: int = 0, **training: Any) -> Setup:
    """Train with surrogate gradients."""
    torch.manual_seed(seed)
    net = Spiking()
    return plain(
        net, lambda step: tones(step, seed), lambda b: F.cross_entropy(net(b[0]), b[1]), **training
    )


def image_prior(seed: int = 0, **training: Any) -> Setup:
    """Fit one noisy picture from one fixed input: every batch is the same, as it has to be."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    at = seeded(seed, 3)
    x, grid = torch.randn(1, 4, 8, 8, generator=at), torch.linspace(-1, 1, 16)
    picture = torch.sin(3 * grid[:, None]) * torch.cos(2 * grid)[None]
    y = (picture + 0.2 * torch.randn(16, 16, generator=at))[None, None]
    return plain(net, lambda _: (x, y), lambda b: F.mse_loss(net(b[0]), b[1]), **training)


def distance_field(seed: int = 0, weight: float = 0.1, **training: Any) -> Setup:
    """Learn the distance to a circle, with gradients of norm 1 (a second backward inside)."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 32, 1, activation=nn.Softplus)

    def batch(step: int) -> Batch:
        return 2 * torch.rand(96, 2, generator=seeded(seed, step, 8)) - 1

    def loss(x: Batch) -> torch.Tensor:
        x = x.clone().requires_grad_()
        value = net(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        truth = x.detach().norm(dim=1, keepdim=True) - 0.5
        return (value - truth).abs().mean() + weight * (slope.norm(dim=1) - 1).square().mean()

    return plain(net, batch, loss, **training)


class Growing(nn.Module):
    """Three stages, the later ones faded in."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 5, 2, 2)
        self.later = nn.ModuleList([nn.Conv1d(width, width, 3, 1, 1) for _ in range(2)])
        self.head = nn.Linear(width, TONES)
        self.share = [0.0, 0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = F.relu(self.first(x))
        for layer, share in zip(self.later, self.share, strict=True):
            if share:
                x = x.lerp(F.relu(layer(x)), share)
        return self.head(x.square().mean(-1))


def growing(seed: int = 0, **training: Any) -> Setup:
    """Fade layers in from steps 60 and 160 on."""
    torch.manual_seed(seed)
    net = Growing()

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    def grow(step: int) -> None:
        net.share = [min(1.0, max(0.0, (step - begin) / 40)) for begin in (60, 160)]

    return plain(net, lambda step: tones(step, seed), loss, after_step=grow, **training)


def gradient_penalty(seed: int = 0, weight: float = 1.0, **training: Any) -> Setup:
    """Classify with a penalty on the gradient by the inputs, as R1 has it."""
    torch.manual_seed(seed)
    net = Dilated(8, 3)

    def loss(given: Batch) -> torch.Tensor:
        x = given[0].clone().requires_grad_()
        value = F.cross_entropy(net(x), given[1], reduction="sum")
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value / len(x) + weight * slope.square().sum((1, 2)).mean()

    return plain(net, lambda step: tones(step, seed), loss, **training)


def mean_teacher(seed: int = 0, lr: float = 3e-3, most: float = 4.0) -> Setup:
    """Learn from few labels and an averaged teacher, whose loss is ramped up over the run."""
    torch.manual_seed(seed)
    net, teacher = Dilated(10, 3), Dilated(10, 3)
    teacher.load_state_dict(net.state_dict())
    teacher.requires_grad_(False)
    optimizer = make_optimizer("adamw", net.parameters(), lr)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x, y = loop.fault.data(loop.setup, step)
        at = seeded(seed, step, 9)
        loop.zero_grad(optimizer)
        a, b = (x + 0.2 * torch.randn(x.shape, generator=at) for _ in range(2))
        logits = net(a)
        apart = F.mse_loss(logits.softmax(-1), teacher(b).softmax(-1))
        loss = F.cross_entropy(logits[:8], y[:8]) + most * min(1.0, step / 200) * apart
        loop.backward(loss)
        loop.apply(optimizer)
        for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.02)
        return loss.detach()

    return Setup([net], [optimizer], lambda step: tones(step, seed), one_step=one_step)

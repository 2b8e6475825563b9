"""Generative models: VAE, GAN, diffusion, normalizing flow."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.setup import (
    Batch,
    Loop,
    Schedule,
    Setup,
    constant,
    optimizer_of,
    seeded,
)
from benchmarks.alarms.kinds.vision import images


def mlp(*widths: int, activation: type[nn.Module] = nn.GELU, norm: bool = False) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if i < len(widths) - 2:
            layers += [nn.LayerNorm(b)] if norm else []
            layers.append(activation())
    return nn.Sequential(*layers)


class Named(nn.Module):
    """A model whose parameters have a name of their own beside those of another model."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)
        self._name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the model."""
        result: torch.Tensor = getattr(self, self._name)(x)
        return result


class Vae(nn.Module):
    """Encoder and decoder of 64 pixels."""

    def __init__(self, hidden: int = 48, latent: int = 6) -> None:
        super().__init__()
        self.encoder = mlp(64, hidden, 2 * latent)
        self.decoder = mlp(latent, hidden, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the reconstruction, and mean and log variance of the code."""
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def vae(
    lr: float = 2e-3,
    optimizer: str = "adamw",
    beta: float = 1.0,
    anneal: int = 0,
    schedule: Schedule = constant,
    clip: float | None = None,
    scale: float = 1.0,
    decay: float = 0.01,
    seed: int = 0,
) -> Setup:
    """Reconstruct images; `anneal` raises the weight of the KL term over so many steps."""
    torch.manual_seed(seed)
    net, now = Vae(), [0]

    def loss(x: Batch) -> torch.Tensor:
        y, mean, log_variance = net(x)
        kl = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(-1).mean()
        weight = beta * (min(1.0, now[0] / anneal) if anneal else 1.0)
        return scale * (F.mse_loss(y, x, reduction="none").sum(-1).mean() + weight * kl)

    def after(step: int) -> None:
        now[0] = step

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr, decay)],
        lambda step: images(step, seed)[0].flatten(1),
        loss,
        schedule,
        clip,
        after_step=after,
    )


def gan(
    lr: float = 1e-3, ratio: float = 1.0, hinge: bool = False, norm: bool = False, seed: int = 0
) -> Setup:
    """Learn a ring of eight points."""
    torch.manual_seed(seed)
    generator = Named("generator", mlp(4, 32, 32, 2, norm=norm))
    critic = Named("critic", mlp(2, 32, 32, 1, activation=nn.LeakyReLU))
    o_g = torch.optim.Adam(generator.parameters(), lr, betas=(0.5, 0.99))
    o_d = torch.optim.Adam(critic.parameters(), lr * ratio, betas=(0.5, 0.99))

    def real(step: int) -> torch.Tensor:
        at = seeded(seed, step)
        angle = torch.randint(0, 8, (64,), generator=at) * math.pi / 4
        points = torch.stack([angle.cos(), angle.sin()], 1)
        return points + 0.05 * torch.randn(64, 2, generator=at)

    def judge(x: torch.Tensor, wanted: float) -> torch.Tensor:
        score = critic(x)
        if hinge:
            return F.relu(1 - wanted * score).mean()
        return F.softplus(-wanted * score).mean()

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x = loop.fault.data(loop.setup, step)
        fake = generator(torch.randn(64, 4, generator=seeded(seed, step, 1)))
        loop.zero_grad(o_d)
        loss_d = judge(x, 1.0) + judge(fake.detach(), -1.0)
        loop.backward(loss_d)
        loop.apply(o_d)
        loop.zero_grad(o_g)
        loss_g = -critic(fake).mean() if hinge else judge(fake, 1.0)
        loop.backward(loss_g)
        loop.apply(o_g)
        return loss_g + loss_d

    return Setup([generator, critic], [o_g, o_d], real, clip=None, one_step=one_step)


def diffusion(
    lr: float = 2e-3,
    optimizer: str = "adamw",
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    ema: bool = False,
    depth: int = 3,
    seed: int = 0,
) -> Setup:
    """Predict the noise in images; `ema` keeps an average of the weights."""
    torch.manual_seed(seed)
    net = mlp(65, *[64] * depth, 64, activation=nn.SiLU)
    average = [p.detach().clone() for p in net.parameters()]

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 2)
        x = images(step, seed)[0].flatten(1)
        return x, torch.rand(len(x), 1, generator=at), torch.randn(x.shape, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        x, t, noise = given
        noisy = (1 - t).sqrt() * x + t.sqrt() * noise
        return F.mse_loss(net(torch.cat([noisy, t], 1)), noise)

    @torch.no_grad()
    def after(_: int) -> None:
        if ema:
            for kept, p in zip(average, net.parameters(), strict=True):
                kept.lerp_(p, 0.01)

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        batch,
        loss,
        schedule,
        clip,
        after_step=after,
    )


class Coupling(nn.Module):
    """One affine coupling layer."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.net = mlp(2, 32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the code and the log determinant."""
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        shift, log_scale = self.net(a).chunk(2, -1)
        log_scale = log_scale.tanh()
        b = b * log_scale.exp() + shift
        parts = (b, a) if self.flip else (a, b)
        return torch.cat(parts, -1), log_scale.sum(-1)


class Flow(nn.Module):
    """Coupling layers under `layers`."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(i % 2 == 1) for i in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the negative log likelihood."""
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return (0.5 * (x**2).sum(-1) - total).mean()


def flow(
    lr: float = 2e-3,
    optimizer: str = "adamw",
    depth: int = 4,
    spread: float = 0.05,
    schedule: Schedule = constant,
    clip: float | None = None,
    seed: int = 0,
) -> Setup:
    """Fit a narrow density: the negative log likelihood falls below zero."""
    torch.manual_seed(seed)
    net = Flow(depth)

    def batch(step: int) -> Batch:
        at = seeded(seed, step)
        base = torch.randn(64, 4, generator=at)
        turned = torch.stack([base[:, 0], base[:, 0] ** 2, base[:, 1], base[:, 0] * base[:, 1]], 1)
        return 0.5 * turned + spread * torch.randn(64, 4, generator=at)

    return Setup([net], [optimizer_of(optimizer, net.parameters(), lr)], batch, net, schedule, clip)

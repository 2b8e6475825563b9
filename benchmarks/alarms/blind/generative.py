"""Densities and physics: Wasserstein GAN, codebook, energy, hypernetwork, equations, ODE."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.blind.vision import bars
from benchmarks.alarms.kinds.generative import Named, mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded


def _ring(step: int, seed: int, size: int = 64) -> torch.Tensor:
    at = seeded(seed, step, 11)
    angle = 6.283 * torch.rand(size, 1, generator=at)
    circle = torch.cat([angle.cos(), angle.sin()], 1)
    return 2 * circle + 0.1 * torch.randn(size, 2, generator=at)


def wasserstein(seed: int = 0, lr: float = 1e-3, critic_steps: int = 3) -> Setup:
    """WGAN with gradient penalty: several critic steps for each step of the generator."""
    torch.manual_seed(seed)
    generator, critic = Named("generator", mlp(4, 32, 2)), Named("critic", mlp(2, 32, 32, 1))
    first = torch.optim.Adam(generator.parameters(), lr, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr, betas=(0.5, 0.9))

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        for i in range(critic_steps):
            real = loop.fault.data(loop.setup, step + 100_000 * i)
            made = generator(torch.randn(64, 4, generator=seeded(seed, step, i))).detach()
            mixed = real.lerp(made, torch.rand(64, 1, generator=seeded(seed, step, i, 1)))
            mixed.requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loop.zero_grad(second)
            distance = critic(made).mean() - critic(real).mean()
            loop.backward(distance + 10 * ((slope.norm(dim=1) - 1) ** 2).mean())
            loop.apply(second)
        loop.zero_grad(first)
        loss = -critic(generator(torch.randn(64, 4, generator=seeded(seed, step, 9)))).mean()
        loop.backward(loss)
        loop.apply(first)
        return loss

    return Setup(
        [generator, critic],
        [first, second],
        lambda step: _ring(step, seed),
        one_step=one_step,
        clip=None,
    )


class Codebook(nn.Module):
    """Encoder, vectors to choose from, decoder."""

    def __init__(self, codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.encoder = mlp(64, 48, width)
        self.codes = nn.Embedding(codes, width)
        self.decoder = mlp(width, 48, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reconstruction and the loss of the codes."""
        z = self.encoder(x)
        chosen = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        apart = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())
        return self.decoder(z + (chosen - z).detach()), apart


def codebook(seed: int = 0, **training: Any) -> Setup:
    """VQ-VAE: straight-through choice of a code; many codes rest for long."""
    torch.manual_seed(seed)
    net = Codebook()

    def loss(x: Batch) -> torch.Tensor:
        again, apart = net(x)
        return F.mse_loss(again, x) + apart

    return plain(net, lambda step: bars(step, seed)[0].flatten(1), loss, **training)


def energy(seed: int = 0, regular: float = 0.1, **training: Any) -> Setup:
    """Contrastive divergence with Langevin samples: the loss stays about zero, of either sign."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 32, 1, activation=nn.SiLU)

    def samples(start: torch.Tensor) -> torch.Tensor:
        x = start.clone().requires_grad_()
        for _ in range(6):
            (slope,) = torch.autograd.grad(net(x).sum(), x)
            x = (x - 0.1 * slope + 0.1 * torch.randn_like(x)).detach().requires_grad_()
        return x.detach()

    def loss(real: Batch) -> torch.Tensor:
        made = samples(torch.randn_like(real) * 2)
        low, high = net(real), net(made)
        return low.mean() - high.mean() + regular * (low**2 + high**2).mean()

    return plain(net, lambda step: _ring(step, seed), loss, **{"lr": 1e-3, **training})


class Hypernetwork(nn.Module):
    """A network that gives the weights of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.task = nn.Embedding(6, 8)
        self.make = mlp(8, 32, 2 * 16 + 16)

    def forward(self, task: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Evaluate the network of each task at its points."""
        weights = self.make(self.task(task))
        first, shift, last = weights.chunk(3, -1)
        return ((x * first[:, None] + shift[:, None]).tanh() * last[:, None]).sum(-1, keepdim=True)


def hypernetwork(seed: int = 0, **training: Any) -> Setup:
    """Fit six sines at once by weights that a network makes."""
    torch.manual_seed(seed)
    net = Hypernetwork()

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 12)
        task = torch.randint(0, 6, (24,), generator=at)
        x = 4 * torch.rand(24, 10, 1, generator=at) - 2
        return task, x, (x + task[:, None, None]).sin()

    return plain(
        net, batch, lambda given: F.mse_loss(net(given[0], given[1]), given[2]), **training
    )


def physics(seed: int = 0, weight: float = 10.0, **training: Any) -> Setup:
    """Solve u'' = -u with boundary values: the loss has derivatives of the network in it."""
    torch.manual_seed(seed)
    net = mlp(1, 24, 24, 1, activation=nn.Tanh)

    def batch(step: int) -> Batch:
        return 3.14 * torch.rand(64, 1, generator=seeded(seed, step, 13))

    def loss(points: Batch) -> torch.Tensor:
        x = points.clone().requires_grad_()
        u = net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        ends = net(torch.tensor([[0.0], [1.5708]])) - torch.tensor([[0.0], [1.0]])
        return ((bend + u) ** 2).mean() + weight * (ends**2).mean()

    return plain(net, batch, loss, **{"clip": None, "lr": 2e-3, **training})


def trajectory(seed: int = 0, **training: Any) -> Setup:
    """A neural ODE: gradients go through ten Euler steps of the same network."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 2, activation=nn.Tanh)

    def batch(step: int) -> Batch:
        x = torch.randn(64, 2, generator=seeded(seed, step, 14))
        turn = torch.tensor([[0.54, -0.84], [0.84, 0.54]])
        return x, x @ turn

    def loss(given: Batch) -> torch.Tensor:
        x = given[0]
        for _ in range(10):
            x = x + 0.1 * net(x)
        return F.mse_loss(x, given[1])

    return plain(net, batch, loss, **training)


class Sparse(nn.Module):
    """A wide layer of which few units are active."""

    def __init__(self, inside: int = 16, units: int = 64) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(inside, units), nn.Linear(units, inside)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return reconstruction and activations."""
        z = self.encoder(x).relu()
        return self.decoder(z), z


def sparse_codes(seed: int = 0, penalty: float = 0.05, **training: Any) -> Setup:
    """A sparse autoencoder: L1 on the activations, so that many units rest."""
    torch.manual_seed(seed)
    net, parts = Sparse(), torch.randn(40, 16, generator=seeded(98))

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 15)
        used = (torch.rand(64, 40, generator=at) < 0.05).float()
        return used @ parts

    def loss(x: Batch) -> torch.Tensor:
        again, z = net(x)
        return F.mse_loss(again, x) + penalty * z.abs().mean()

    return plain(net, batch, loss, **training)


def score_matching(seed: int = 0, optimizer: str = "adamw", lr: float = 2e-3) -> Setup:
    """Denoising score matching over random noise levels; the loss is noisy for ever."""
    torch.manual_seed(seed)
    net = mlp(3, 48, 48, 2, activation=nn.SiLU)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 16)
        sigma = 10 ** (2 * torch.rand(64, 1, generator=at) - 1.7)
        return _ring(step, seed), sigma, torch.randn(64, 2, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        x, sigma, noise = given
        found = net(torch.cat([x + sigma * noise, sigma.log()], 1))
        return ((found + noise) ** 2).mean()

    held = make_optimizer(optimizer, net.parameters(), lr)
    return Setup([net], [held], batch, loss, clip=None)

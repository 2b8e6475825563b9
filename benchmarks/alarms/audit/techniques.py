"""Ways to train: averaged clients, merged adapters, one cycle, found rates, ramps, two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.audit.perception import Segmenter, digits, encoder, segments
from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded


def reading(norm: bool = True) -> nn.Sequential:
    """Return a classifier of digits."""
    return encoder(12, 32, norm).append(nn.ReLU()).append(nn.Linear(32, 10))


def _classify(net: nn.Module) -> Any:
    return lambda b: F.cross_entropy(net(b[0]), b[1])


def federated(seed: int = 0, clients: int = 4, local: int = 10, **training: Any) -> Setup:
    """Train on each client in turn from the common weights, and average after each round.

    A client has more of some digits than of others, in its own handwriting.
    """
    torch.manual_seed(seed)
    net = reading(norm=False)
    common = copy.deepcopy(net.state_dict())
    sums = {name: torch.zeros_like(value) for name, value in common.items()}

    def batch(step: int) -> Batch:
        client = (step - 1) // local % clients
        x, y = digits(step, seed, 48)
        first = (y % clients == client).float() + 0.5
        order = torch.multinomial(first, 24, generator=seeded(seed, step, 61))
        return x[order] * (0.8 + 0.15 * client), y[order]

    def after(step: int) -> None:
        if step % local:
            return
        with torch.no_grad():
            for name, value in net.state_dict().items():
                sums[name] += value / clients
            if step // local % clients == 0:
                for name, total in sums.items():
                    common[name].copy_(total)
                    total.zero_()
            net.load_state_dict(common)

    return plain(net, batch, _classify(net), after_step=after, **training)


class Merged(nn.Module):
    """A fixed matrix and a product of two thin ones that is merged into it now and then."""

    def __init__(self, ins: int, outs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(ins, outs)
        self.base.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, ins) / ins**0.5)
        self.up = nn.Parameter(torch.zeros(outs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        return self.base(x) + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self) -> None:
        """Move the product into the matrix and begin again."""
        self.base.weight += self.up @ self.down
        self.up.zero_()
        self.down.normal_(std=self.down.shape[1] ** -0.5)


def merged_adapters(seed: int = 0, every: int = 100, **training: Any) -> Setup:
    """Learn a matrix of full rank from adapters, which are merged and begun anew."""
    torch.manual_seed(seed)
    net = nn.Sequential(Merged(24, 48), nn.GELU(), Merged(48, 48), nn.GELU(), nn.Linear(48, 8))
    truth = torch.randn(24, 8, generator=seeded(seed, 62)) / 24**0.5

    def batch(step: int) -> Batch:
        x = torch.randn(64, 24, generator=seeded(seed, step, 63))
        return x, (x @ truth).tanh() + x[:, :8] * x[:, 8:16]

    def after(step: int) -> None:
        if step % every == 0:
            for layer in net:
                if isinstance(layer, Merged):
                    layer.merge()
                    for p in (layer.up, layer.down):
                        setup.optimizers[0].state.pop(p, None)

    setup = plain(net, batch, lambda b: F.mse_loss(net(b[0]), b[1]), after_step=after, **training)
    return setup


def merged_rate(every: int = 100, warmup: int = 10) -> Any:
    """Return the rate that rises again after each merge."""
    return lambda step: min(1.0, ((step - 1) % every + 1) / warmup)


def momentum_cycle(seed: int = 0, steps: int = 400, lr: float = 0.1) -> Setup:
    """Let the rate rise to its most and fall to nothing, with the momentum the other way round."""
    torch.manual_seed(seed)
    net = reading()
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.95, weight_decay=5e-4)

    def share(step: int) -> float:
        turn = 0.3 * steps
        return step / turn if step < turn else max(0.0, (steps - step) / (steps - turn))

    def after(step: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.95 - 0.1 * share(step + 1)

    return Setup(
        [net],
        [optimizer],
        lambda step: digits(step, seed, noise=0.6),
        _classify(net),
        lambda step: 0.04 + 0.96 * share(step) if step < 0.3 * steps else share(step) + 1e-4,
        None,
        after_step=after,
        validate=lambda: _held_out(net, seed),
        evaluate_every=80,
    )


@torch.no_grad()
def _held_out(net: nn.Module, seed: int) -> float:
    net.eval()
    value = float(_classify(net)(digits(-5, seed, 128, 0.6)))
    net.train()
    return value


class Found(torch.optim.Optimizer):
    """Adam whose step size is estimated from how far it has come, as D-adaptation has it."""

    def __init__(self, held: Any, lr: float = 1.0, first: float = 1e-6) -> None:
        super().__init__(held, {"lr": lr})
        self.size, self.along = first, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Estimate the size and update all parameters with it."""
        total, group = 0.0, self.param_groups[0]
        held = [p for p in group["params"] if p.grad is not None]
        self.along *= 0.99
        for p in held:
            state, grad = self.state[p], p.grad
            assert grad is not None
            if not state:
                state.update(start=p.clone(), **{k: torch.zeros_like(p) for k in "mvs"})
            self.along += 0.01 * self.size**2 * float((grad * (state["start"] - p)).sum())
            state["s"].mul_(0.99).add_(grad, alpha=0.01 * self.size**2)
            state["m"].mul_(0.9).add_(grad, alpha=0.1 * self.size)
            state["v"].mul_(0.99).add_(grad**2, alpha=0.01 * self.size**2)
            total += float(state["s"].abs().sum())
        if total > 0:
            self.size = max(self.size, self.along / total)
        for p in held:
            state = self.state[p]
            move = state["m"] / (state["v"].sqrt() + self.size * 1e-8)
            p.add_(move, alpha=-group["lr"] * self.size)


def found_rate(seed: int = 0, lr: float = 1.0, first: float = 1e-6) -> Setup:
    """Begin with a tiny rate that the optimizer raises itself."""
    torch.manual_seed(seed)
    net = reading(norm=False)
    batch, loss = (lambda step: digits(step, seed)), _classify(net)
    return Setup([net], [Found(net.parameters(), lr, first)], batch, loss, clip=None)


def batch_ramp(
    seed: int = 0, period: int = 80, most: int = 128, undivided_at: int = 0, **training: Any
) -> Setup:
    """Double the batch every `period` steps, from 8 on.

    From `undivided_at` on eight micro-batches are added up in each step, not averaged.
    """
    torch.manual_seed(seed)
    net, now = reading(), [1]
    loss = _classify(net)

    def batch(step: int) -> Batch:
        return digits(step, seed, min(most, 8 * 2 ** (step // period)))

    def total(given: Batch) -> torch.Tensor:
        value = loss(given)
        if undivided_at and now[0] >= undivided_at:
            more = [loss(digits(now[0] + 1000 * i, seed)) for i in range(1, 8)]
            extra = torch.stack(more).sum()
            value = value + extra
        return value

    def after(step: int) -> None:
        now[0] = step + 1

    return plain(net, batch, total, after_step=after, **training)


class Shop(nn.Module):
    """Tables of customers and goods and a net on both."""

    def __init__(self) -> None:
        super().__init__()
        self.who, self.what = nn.Embedding(200, 8), nn.Embedding(100, 8)
        self.top = mlp(16, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a logit."""
        return self.top(torch.cat([self.who(x[:, 0]), self.what(x[:, 1])], 1))[:, 0]


def shop(seed: int = 0, shuffled_on: int = -1, **training: Any) -> Setup:
    """Predict purchases on two ranks; on one of them the labels may be shuffled."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(Shop())
    at = seeded(seed, 64)
    who, what = torch.randn(200, 1, generator=at), torch.randn(100, 1, generator=at)
    both = who + what.T + 0.5 * torch.randn(200, 100, generator=at)

    def batch(step: int) -> Batch:
        chance = seeded(seed, step, 65 + rank)
        x = torch.stack([torch.randint(0, n, (128,), generator=chance) for n in (200, 100)], 1)
        y = (both[x[:, 0], x[:, 1]] > 0).float()
        if rank == shuffled_on:
            y = y[torch.randperm(len(y), generator=chance)]
        return x, y

    def loss(given: Batch) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(net(given[0]), given[1])

    return plain(net, batch, loss, **training)


def ink(seed: int = 0, optimizer: str = "adamw", lr: float = 3e-3, **further: Any) -> Setup:
    """Label the dots of pictures on two ranks, with batch statistics of each rank's own."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(Segmenter())

    def batch(step: int) -> Batch:
        return segments(step, seed + 1000 * rank)

    def loss(given: Batch) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(net(given[0]), given[1])

    chosen = make_optimizer(optimizer, net.parameters(), lr)
    return Setup([net], [chosen], batch, loss, **further)

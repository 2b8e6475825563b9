"""Ways to train: scaled gradients, perturbed weights, averages, tasks in turn, meta-learning."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.alarms.blind.plain import make_optimizer, plain
from benchmarks.alarms.blind.sequences import Encoder
from benchmarks.alarms.blind.vision import Mixer, bars
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Schedule, Setup, seeded


def network(width: int = 10, norm: bool = True, dropout: float = 0.0) -> nn.Sequential:
    """Return two strided convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1),
        nn.BatchNorm2d(width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.BatchNorm2d(2 * width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * width, 32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 4),
    )


def gratings(
    seed: int = 0,
    noisy: float = 0.0,
    rare: bool = False,
    dropout: float = 0.0,
    size: int = 32,
    examples: int = 0,
    norm: bool = True,
    scale: float = 1.0,
    **training: Any,
) -> Setup:
    """Classify gratings with wrong labels, rare classes, dropout, large batches or few examples."""
    torch.manual_seed(seed)
    net = network(norm=norm, dropout=dropout)

    def batch(step: int) -> Batch:
        x, y = bars(step % (examples // size) if examples and step > 0 else step, seed, size)
        at = seeded(seed, step, 31)
        if noisy:
            wrong = torch.rand(size, generator=at) < noisy
            y = torch.where(wrong, torch.randint(0, 4, (size,), generator=at), y)
        if rare:
            keep = (y < 2) | (torch.rand(size, generator=at) < 0.1)
            x, y = torch.cat([x[keep], x])[:size], torch.cat([y[keep], y])[:size]
        return x, y

    def loss(given: Batch) -> torch.Tensor:
        return scale * F.cross_entropy(net(given[0]), given[1])

    return plain(net, batch, loss, **training)


def scaled_gradients(seed: int = 0, start: float = 2.0**12, skip_at: int = 0) -> Setup:
    """Mixed precision with a GradScaler; a batch now and then overflows and its step is skipped."""
    torch.manual_seed(seed)
    net = network(norm=False)
    optimizer = make_optimizer("adamw", net.parameters(), 2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=60)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x, y = loop.fault.data(loop.setup, step)
        loop.zero_grad(optimizer)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y)
        loop.backward(scaler.scale(loss))
        if skip_at and step % skip_at == 0:
            net[0].weight.grad[0, 0, 0, 0] = math.inf  # type: ignore[index, union-attr]
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])  # type: ignore
        loop.fault.gradients(loop.setup, step)
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, norm)
            loop.monitor.check(grad_norm=norm)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Setup([net], [optimizer], lambda step: bars(step, seed), one_step=one_step)


def sharpness_aware(seed: int = 0, rho: float = 0.05, lr: float = 0.05) -> Setup:
    """SAM: a second backward pass at weights that were moved uphill."""
    torch.manual_seed(seed)
    net = network()
    optimizer = make_optimizer("sgd", net.parameters(), lr)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x, y = loop.fault.data(loop.setup, step)
        held = list(net.parameters())
        loop.zero_grad(optimizer)
        loss = F.cross_entropy(net(x), y)
        loop.backward(loss)
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([p.grad for p in held])  # type: ignore[misc]
            moves = [rho * p.grad / (norm + 1e-12) for p in held]
            for p, move in zip(held, moves, strict=True):
                p.add_(move)
        loop.zero_grad(optimizer)
        loop.backward(F.cross_entropy(net(x), y))
        with torch.no_grad():
            for p, move in zip(held, moves, strict=True):
                p.sub_(move)
        loop.apply(optimizer)
        return loss

    return Setup([net], [optimizer], lambda step: bars(step, seed), one_step=one_step, clip=None)


def lookahead(seed: int = 0, every: int = 5, **training: Any) -> Setup:
    """Every few steps the weights go half way back to slow ones."""
    setup = gratings(seed, **training)
    slow = [p.detach().clone() for p in setup.models[0].parameters()]

    @torch.no_grad()
    def back(step: int) -> None:
        if step % every == 0:
            for p, s in zip(setup.models[0].parameters(), slow, strict=True):
                s.lerp_(p, 0.5)
                p.copy_(s)

    setup.after_step = back
    return setup


def evaluated_average(seed: int = 0, **training: Any) -> Setup:
    """An exponential average of the weights is what is evaluated."""
    setup = gratings(seed, evaluate_every=50, **training)
    average = deepcopy(setup.models[0]).requires_grad_(False)

    @torch.no_grad()
    def follow(_: int) -> None:
        for p, s in zip(setup.models[0].parameters(), average.parameters(), strict=True):
            s.lerp_(p, 0.05)

    @torch.no_grad()
    def validate() -> float:
        x, y = bars(-1, seed, 256)
        return F.cross_entropy(average(x), y).item()

    setup.after_step, setup.validate = follow, validate
    return setup


def pruned(seed: int = 0, at: tuple[int, ...] = (120, 180), **training: Any) -> Setup:
    """The smallest weights are set to zero and stay there."""
    setup = gratings(seed, norm=False, **training)
    masks: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def prune(step: int) -> None:
        for name, p in setup.named_parameters():
            if p.ndim > 1 and step in at:
                share = 0.3 * (1 + at.index(step))
                masks[name] = (p.abs() > p.abs().flatten().quantile(share)).float()
            if name in masks:
                p.mul_(masks[name])

    setup.after_step = prune
    return setup


class Quantized(nn.Linear):
    """A layer whose weights are rounded to 4 bits, with gradients straight through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the rounded weights."""
        scale = self.weight.detach().abs().max() / 7
        rounded = (self.weight / scale).round() * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def quantized(seed: int = 0, **training: Any) -> Setup:
    """Quantization-aware training."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Flatten(), Quantized(64, 48), nn.ReLU(), Quantized(48, 48), nn.ReLU(), nn.Linear(48, 4)
    )
    return _classify(net, seed, training)


def normed_weights(seed: int = 0, spectral: bool = False, **training: Any) -> Setup:
    """Weight or spectral normalization of each layer."""
    torch.manual_seed(seed)
    norm = parametrizations.spectral_norm if spectral else parametrizations.weight_norm
    net = mlp(64, 48, 48, 4)
    for i in (0, 2, 4):
        norm(net[i])
    return _classify(nn.Sequential(nn.Flatten(), net), seed, training)


def _classify(net: nn.Module, seed: int, training: dict[str, Any]) -> Setup:
    return plain(
        net,
        lambda step: bars(step, seed),
        lambda given: F.cross_entropy(net(given[0]), given[1]),
        **training,
    )


def adversarial(seed: int = 0, size: float = 0.2, **training: Any) -> Setup:
    """Train on inputs that were moved along the sign of their gradient."""
    torch.manual_seed(seed)
    net = network(norm=False)

    def loss(given: Batch) -> torch.Tensor:
        x = given[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), given[1]), x)
        return F.cross_entropy(net((x + size * slope.sign()).detach()), given[1])

    return plain(net, lambda step: bars(step, seed), loss, **training)


def layer_rates(seed: int = 0, factor: float = 0.5, **training: Any) -> Setup:
    """A lower rate for each layer towards the input."""
    torch.manual_seed(seed)
    net = Mixer(4)
    setup = _classify(net, seed, training)
    rate = setup.optimizers[0].param_groups[0]["lr"]
    groups = [{"params": [*net.patch.parameters()], "lr": rate * factor**5}]
    for i, layer in enumerate(net.layers):
        groups.append({"params": [*layer.parameters()], "lr": rate * factor ** (4 - i)})
    groups.append({"params": [*net.head.parameters()], "lr": rate})
    setup.optimizers = [torch.optim.AdamW(groups)]
    return setup


def unfreezing(seed: int = 0, every: int = 80, **training: Any) -> Setup:
    """Only the head learns at first; the layers follow one after the other."""
    torch.manual_seed(seed)
    net = Mixer(3)
    setup = _classify(net, seed, training)
    parts = [*reversed(net.layers), net.patch]
    for part in parts:
        part.requires_grad_(False)

    def thaw(step: int) -> None:
        if step % every == 0 and step // every <= len(parts):
            parts[step // every - 1].requires_grad_(True)

    setup.after_step = thaw
    return setup


def frozen_norms(seed: int = 0, **training: Any) -> Setup:
    """BatchNorm stays in eval mode from the start, as in detectors that are fine-tuned."""
    setup = gratings(seed, **training)
    for module in setup.models[0].modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    return setup


def tasks_in_turn(seed: int = 0, every: int = 100, keep: float = 0.0, **training: Any) -> Setup:
    """Continual learning: other targets after every `every` steps, with some of the old data."""
    torch.manual_seed(seed)
    net = mlp(64, 48, 48, 4)

    def batch(step: int) -> Batch:
        x, y = bars(step, seed)
        old = torch.rand(len(y), generator=seeded(seed, step, 32)) < keep
        return x.flatten(1), torch.where(old, y, (y + step % 100_000 // every) % 4)

    return plain(
        net,
        batch,
        lambda given: F.cross_entropy(net(given[0]), given[1]),
        **{"config": {"loss": {"expected_to_fall": False}}, **training},
    )


def learning_to_learn(seed: int = 0, inner: float = 0.05, **training: Any) -> Setup:
    """MAML: the loss after one gradient step on a new sine."""
    torch.manual_seed(seed)
    net = mlp(1, 32, 32, 1)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 33)
        phase = 3.14 * torch.rand(6, 1, 1, generator=at)
        x = 6 * torch.rand(6, 20, 1, generator=at) - 3
        return x, (x + phase).sin()

    def loss(given: Batch) -> torch.Tensor:
        total = torch.zeros(())
        held = dict(net.named_parameters())
        for x, y in zip(*given, strict=True):
            first = F.mse_loss(torch.func.functional_call(net, held, x[:10]), y[:10])
            slopes = torch.autograd.grad(first, [*held.values()], create_graph=True)
            moved = {n: p - inner * g for (n, p), g in zip(held.items(), slopes, strict=True)}
            total = total + F.mse_loss(torch.func.functional_call(net, moved, x[10:]), y[10:])
        return total / len(given[0])

    return plain(net, batch, loss, **{"lr": 2e-3, **training})


def cyclic(period: int) -> Schedule:
    """Rise and fall between a tenth and the whole rate."""
    return lambda step: 0.1 + 0.9 * (1 - abs(2 * (step % period) / period - 1))


def one_cycle(steps: int) -> Schedule:
    """Rise from a twentieth to the rate in 30% of the run, then fall to almost 0."""

    def factor(step: int) -> float:
        share = step / steps
        if share < 0.3:
            return 0.05 + 0.95 * (1 - math.cos(math.pi * share / 0.3)) / 2
        return 1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2

    return factor


def rate_search(steps: int, decades: float = 4.0) -> Schedule:
    """Rise exponentially to the rate, as a search for a learning rate does."""
    return lambda step: float(10 ** (-decades * (1 - step / steps)))


def inverse_root(warmup: int) -> Schedule:
    """Rise, then fall with the root of the step."""
    return lambda step: min(step / warmup, (warmup / step) ** 0.5)


def parallel(seed: int = 0, model: str = "transformer", **training: Any) -> Setup:
    """Train replicas of a transformer, or of embeddings, on two ranks."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(
        Encoder(2, 16, 12) if model == "transformer" else Mixer(2, 12)
    )

    def batch(step: int) -> Batch:
        if model == "mixer":
            return bars(step, seed + 1000 * rank)
        x = torch.randint(0, 6, (32, 6), generator=seeded(seed, step, rank, 34))
        return x, (x + x.roll(1, 1)) % 12

    def loss(given: Batch) -> torch.Tensor:
        out = net(given[0])
        return F.cross_entropy(out if model == "mixer" else out.flatten(0, 1), given[1].flatten())

    return plain(net, batch, loss, **training)

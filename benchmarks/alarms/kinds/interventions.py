"""Healthy runs into which the trainer reaches: pruning, quantization, swaps, resets, idle parts."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import convolutional, images


def _classifier(
    net: nn.Module,
    seed: int,
    optimizer: str = "adamw",
    lr: float = 2e-3,
    schedule: Schedule = constant,
) -> Setup:
    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    made = optimizer_of(optimizer, net.parameters(), lr)
    return Setup([net], [made], lambda step: images(step, seed), loss, schedule)


def gradual_pruning(
    seed: int = 0,
    begin: int = 100,
    end: int = 250,
    most: float = 0.9,
    every: int = 10,
    **training: object,
) -> Setup:
    """Set more and more of the smallest weights to zero while training goes on."""
    torch.manual_seed(seed)
    net = convolutional(8)
    setup = _classifier(net, seed, **training)  # type: ignore[arg-type]
    masks: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def after_step(step: int) -> None:
        weights = {name: p for name, p in net.named_parameters() if p.ndim > 1}
        if begin <= step <= end and (step - begin) % every == 0:
            share = most * (1 - (1 - (step - begin) / (end - begin)) ** 3)
            for name, p in weights.items():
                kept = max(1, round((1 - share) * p.numel()))
                masks[name] = p.abs() >= p.abs().flatten().topk(kept).values[-1]
        for name, mask in masks.items():
            weights[name].mul_(mask)

    setup.after_step = after_step
    return setup


def pruned_once(seed: int = 0, at: int = 205, share: float = 0.8, **training: object) -> Setup:
    """Set most weights to zero in the middle of the run and train what is left."""
    return gradual_pruning(seed, at, at + 1, share, 1, **training)


class Rounded(nn.Module):
    """A classifier whose weights can be rounded to few levels in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 10)
        self.levels = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = x.flatten(1)
        for i, layer in enumerate((self.first, self.second, self.head)):
            w = layer.weight
            if self.levels:
                unit = w.detach().abs().amax() / self.levels
                w = w + ((w / unit).round() * unit - w).detach()
            x = F.linear(x, w, layer.bias)
            x = F.relu(x) if i < 2 else x
        return x


def quantized_late(seed: int = 0, at: int = 155, levels: int = 1, lr: float = 2e-3) -> Setup:
    """Switch quantization of the weights on in the middle of the run."""
    torch.manual_seed(seed)
    net = Rounded()
    setup = _classifier(net, seed, lr=lr)

    def after_step(step: int) -> None:
        net.levels = levels if step >= at else 0

    setup.after_step = after_step
    return setup


def swapped_average(
    seed: int = 0, every: int = 50, decay: float = 0.98, back: bool = True, **training: object
) -> Setup:
    """Evaluate the moving average of the weights; `back=False` keeps it, as a restart from it."""
    torch.manual_seed(seed)
    net = convolutional(8)
    setup = _classifier(net, seed, **training)  # type: ignore[arg-type]
    average = deepcopy(net)

    @torch.no_grad()
    def after_step(step: int) -> None:
        for a, p in zip(average.parameters(), net.parameters(), strict=True):
            a.lerp_(p, 1 - decay)
        if not back and step % every == 0:
            net.load_state_dict(average.state_dict())

    @torch.no_grad()
    def validate() -> float:
        own = deepcopy(net.state_dict())
        net.load_state_dict({**own, **dict(average.named_parameters())})
        net.eval()
        x, y = images(10**6, seed, 256)
        value = F.cross_entropy(net(x), y).item()
        net.load_state_dict(own)
        net.train()
        return value

    setup.after_step, setup.validate = after_step, validate
    setup.evaluate_every = every if back else 0
    return setup


class Specialists(nn.Module):
    """A hard choice of an expert by the domain of an input."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(12, 24), nn.Linear(24, 4)
        self.experts = nn.ModuleList([mlp(24, 24, 24) for _ in range(experts)])

    def forward(self, x: torch.Tensor, domain: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        h = F.gelu(self.stem(x))
        out = h
        for i, expert in enumerate(self.experts):
            mine = domain == i
            if mine.any():
                out = out.index_add(0, mine.nonzero()[:, 0], expert(h[mine]))
        return self.head(out)


def idle_experts(
    seed: int = 0, used: int = 4, late: int = 0, stop: int = 0, lr: float = 2e-3
) -> Setup:
    """Train experts of which some get no input for long: from the start, until, or from a step."""
    torch.manual_seed(seed)
    net = Specialists()
    labels = torch.randn(6, 12, 4, generator=seeded(seed, 41))

    def batch(step: int) -> Batch:
        at, now = seeded(seed, step, 42), step % 100_000
        few = (late and now < late) or (stop and now >= stop) or not (late or stop)
        domain = torch.randint(0, used if few else 6, (64,), generator=at)
        x = torch.randn(64, 12, generator=at)
        return x, domain, torch.einsum("bi,bij->bj", x, labels[domain]).argmax(1)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0], given[1]), given[2])

    return Setup([net], [optimizer_of("adamw", net.parameters(), lr)], batch, loss)


def starving_router(
    seed: int = 0, experts: int = 6, bias: float = 2.0, lr: float = 2e-3, top: int = 1
) -> Setup:
    """Route by a learned gate without a term for balance: some experts drop out, others return."""
    torch.manual_seed(seed)
    net = Specialists(experts)
    gate = nn.Linear(12, experts)
    with torch.no_grad():
        gate.bias[: experts - 2] += bias
    both = nn.ModuleDict({"net": net, "gate": gate})
    labels = torch.randn(12, 4, generator=seeded(seed, 43))

    def batch(step: int) -> Batch:
        x = torch.randn(64, 12, generator=seeded(seed, step, 44))
        return x, ((x @ labels) * x[:, :1]).argmax(1)

    def loss(given: Batch) -> torch.Tensor:
        x, y = given
        share = gate(x).softmax(1)
        out = torch.zeros(len(x), 4)
        weight, chosen = share.topk(top, 1)
        for k in range(top):
            out = out + weight[:, k : k + 1] * net(x, chosen[:, k])
        return F.cross_entropy(4 * out, y)

    return Setup([both], [optimizer_of("adamw", both.parameters(), lr)], batch, loss)


def periodic_resets(seed: int = 0, every: int = 80, lr: float = 2e-3) -> Setup:
    """Draw the last layer anew every so many steps, to keep a network able to learn."""
    torch.manual_seed(seed)
    net = convolutional(8)
    setup = _classifier(net, seed, lr=lr)

    def after_step(step: int) -> None:
        if step % every == 0:
            net[-1].reset_parameters()  # type: ignore[index,operator]

    setup.after_step = after_step
    return setup


def small_graph(
    seed: int = 0,
    nodes: int = 120,
    known: int = 40,
    lr: float = 1e-2,
    noise: float = 1.0,
    evaluate_every: int = 50,
    decay: float = 0.01,
) -> Setup:
    """Classify the nodes of one small graph from a few labels: it is learned by heart."""
    torch.manual_seed(seed)
    at = seeded(seed, 45)
    label = torch.randint(0, 4, (nodes,), generator=at)
    near = (label[:, None] == label[None]).float() * 0.06 + 0.02
    edges = (torch.rand(nodes, nodes, generator=at) < near).float()
    edges = ((edges + edges.T) > 0).float() + torch.eye(nodes)
    spread = edges / edges.sum(1, keepdim=True)
    x = F.one_hot(label, 4).float() @ torch.randn(4, 24, generator=at)
    x = x + noise * 2 * torch.randn(nodes, 24, generator=at)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 4)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.second(spread @ F.relu(self.first(spread @ given)))

    net = Graph()

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0])[:known], given[1][:known])

    @torch.no_grad()
    def validate() -> float:
        return F.cross_entropy(net(x)[known:], label[known:]).item()

    return Setup(
        [net],
        [optimizer_of("adamw", net.parameters(), lr, decay)],
        lambda _: (x, label),
        loss,
        validate=validate,
        evaluate_every=evaluate_every,
    )

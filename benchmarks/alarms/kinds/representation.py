"""Representations: contrastive, BYOL, probes, fine-tuning."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded
from benchmarks.alarms.kinds.vision import CLASSES, ResNet, images


def contrastive(
    lr: float = 1e-3,
    optimizer: str = "adamw",
    temperature: float = 0.2,
    learned: bool = False,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    seed: int = 0,
) -> Setup:
    """Bring two noisy views of the same image together; `learned` trains the temperature."""
    torch.manual_seed(seed)
    net = nn.ModuleDict({"body": mlp(64, 64, 32), "head": mlp(32, 32, 16)})
    net.register_parameter(
        "log_scale", nn.Parameter(torch.tensor(1 / temperature).log(), requires_grad=learned)
    )

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(net["head"](net["body"](x)), dim=-1)

    encoder = Encoder()

    def batch(step: int) -> Batch:
        x = images(step, seed)[0].flatten(1)
        noise = torch.randn(2, *x.shape, generator=seeded(seed, step, 3))
        return x + 0.3 * noise[0], x + 0.3 * noise[1]

    def loss(given: Batch) -> torch.Tensor:
        logits = encoder(given[0]) @ encoder(given[1]).T * net.log_scale.exp()
        return F.cross_entropy(logits, torch.arange(len(logits)))

    trained = [p for p in encoder.parameters() if p.requires_grad]
    return Setup([encoder], [optimizer_of(optimizer, trained, lr)], batch, loss, schedule, clip)


def byol(
    lr: float = 1e-3,
    momentum: float = 0.99,
    optimizer: str = "adamw",
    schedule: Schedule = constant,
    seed: int = 0,
) -> Setup:
    """Predict the code that an average of the model gives another view."""
    torch.manual_seed(seed)
    online = nn.ModuleDict({"body": mlp(64, 64, 32, norm=True), "predictor": mlp(32, 32, 32)})

    class Online(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = online

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(online["predictor"](online["body"](x)), dim=-1)

    net, target = Online(), deepcopy(online["body"]).requires_grad_(False)

    def batch(step: int) -> Batch:
        x = images(step, seed)[0].flatten(1)
        noise = torch.randn(2, *x.shape, generator=seeded(seed, step, 3))
        return x + 0.3 * noise[0], x + 0.3 * noise[1]

    def loss(given: Batch) -> torch.Tensor:
        with torch.no_grad():
            wanted = F.normalize(target(given[1]), dim=-1)
        return 2 - 2 * (net(given[0]) * wanted).sum(-1).mean()

    @torch.no_grad()
    def after(_: int) -> None:
        for kept, p in zip(target.parameters(), online["body"].parameters(), strict=True):
            kept.lerp_(p, 1 - momentum)

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        batch,
        loss,
        schedule,
        None,
        after_step=after,
    )


def _pretrained(seed: int, steps: int = 120) -> ResNet:
    """Return a network that has learned other classes before."""
    torch.manual_seed(seed + 50)
    net = ResNet(2)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(steps):
        x, y = images(step, seed + 9)
        optimizer.zero_grad()
        F.cross_entropy(net(x), (y * 3 + 1) % CLASSES).backward()
        optimizer.step()
    return net


def finetune(
    mode: str = "full",
    lr: float = 5e-4,
    optimizer: str = "adamw",
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    unfreeze_at: int = 0,
    evaluate_every: int = 0,
    seed: int = 0,
) -> Setup:
    """Train a pretrained network on other labels; `probe` trains a new head only.

    With `unfreeze_at` the body is frozen until that step.
    """
    net = _pretrained(seed)
    net.head = nn.Linear(net.head.in_features, CLASSES)
    body = [p for n, p in net.named_parameters() if not n.startswith("head")]
    if mode == "probe" or unfreeze_at:
        for p in body:
            p.requires_grad_(False)
    trained = net.head.parameters() if mode == "probe" else net.parameters()

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1])

    def after(step: int) -> None:
        if unfreeze_at and step == unfreeze_at:
            for p in body:
                p.requires_grad_(True)

    @torch.no_grad()
    def validate() -> float:
        was, x = net.training, images(10**6, seed + 1, 128)
        net.eval()
        value = loss(x).item()
        net.train(was)
        return value

    return Setup(
        [net],
        [optimizer_of(optimizer, trained, lr)],
        lambda step: images(step, seed),
        loss,
        schedule,
        clip,
        validate=validate,
        evaluate_every=evaluate_every,
        after_step=after,
    )

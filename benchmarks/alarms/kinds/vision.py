"""Images: convolutions with BatchNorm, residual networks, a vision transformer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.setup import Batch, Schedule, Setup, constant, optimizer_of, seeded

CLASSES = 10


def images(step: int, seed: int, size: int = 32) -> Batch:
    """Return noisy, shifted prototypes of ten classes, [size, 1, 8, 8], and their labels."""
    prototypes = torch.randn(CLASSES, 1, 8, 8, generator=seeded(99))
    at = seeded(seed, step)
    labels = torch.randint(0, CLASSES, (size,), generator=at)
    noise = torch.randn(size, 1, 8, 8, generator=at)
    return prototypes[labels] + 0.8 * noise, labels


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a path around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both paths."""
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def convolutional(width: int = 12, dropout: float = 0.0) -> nn.Module:
    """Return a stack of convolutions with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16 * width, CLASSES),
    )


class ResNet(nn.Module):
    """Residual blocks under `blocks`."""

    def __init__(self, depth: int, width: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class VisionTransformer(nn.Module):
    """Patches of 2 x 2, pre-norm blocks under `encoder.layers`."""

    def __init__(self, depth: int, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(x).mean(1))


def classifier(
    model: str = "cnn",
    optimizer: str = "adamw",
    lr: float = 2e-3,
    depth: int = 3,
    schedule: Schedule = constant,
    clip: float | None = None,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    batch_size: int = 32,
    examples: int = 0,
    evaluate_every: int = 0,
    decay: float = 0.01,
    accumulate: int = 1,
    seed: int = 0,
) -> Setup:
    """Classify images; `examples` limits the training data."""
    torch.manual_seed(seed)
    net: nn.Module
    if model == "resnet":
        net = ResNet(depth)
    elif model == "vit":
        net = VisionTransformer(depth)
    else:
        net = convolutional(dropout=dropout)
    some = [images(i, seed, batch_size) for i in range(max(1, examples // batch_size))]

    def batch(step: int) -> Batch:
        return some[step % len(some)] if examples else images(step, seed, batch_size)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1], label_smoothing=smoothing)

    @torch.no_grad()
    def validate() -> float:
        was, x = net.training, images(10**6, seed + 1, 256)
        net.eval()
        value = F.cross_entropy(net(x[0]), x[1], label_smoothing=smoothing).item()
        net.train(was)
        return value

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr, decay)],
        batch,
        loss,
        schedule,
        clip,
        accumulate,
        validate,
        evaluate_every,
    )

"""Small models of several kinds, their data and losses, for runs of some seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Run = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], torch.Tensor]]
"""A model, its optimizer, and the loss of a step."""
VOCABULARY = 32


class Attention(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Experts(nn.Module):
    def __init__(self, width: int, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(experts))
        self.top_k = top_k
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        values, indices = shares.topk(self.top_k)
        used = F.one_hot(indices, shares.shape[-1]).float().mean((0, 1, 2))
        self.balance = shares.shape[-1] * (used * shares.mean((0, 1))).sum()
        output = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            output = output + (values * (indices == i)).sum(-1, keepdim=True) * expert(x)
        return output


class Block(nn.Module):
    def __init__(self, width: int, mlp: nn.Module, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, causal)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, moe: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        kinds = [Experts(width) if moe else Mlp(width) for _ in range(depth)]
        self.blocks = nn.ModuleList(Block(width, each, True) for each in kinds)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _text(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    noise = torch.randint(0, 2, (8, 16), generator=generator)
    return (start + 3 * torch.arange(16) + noise) % VOCABULARY


def language(moe: bool = False) -> Run:
    model = Transformer(moe=moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss(step: int) -> torch.Tensor:
        tokens = _text(step)
        found = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        routers = [m.balance for m in model.modules() if isinstance(m, Experts)]
        return found + (0.01 * sum(routers) if routers else 0.0)

    return model, optimizer, loss


def _images(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (32,), generator=generator)
    images = 0.3 * torch.randn(32, 3, size, size, generator=generator)
    for i, label in enumerate(labels.tolist()):
        images[i, label % 3, 2 * label : 2 * label + 2] += 1.0
    return images, labels


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(inner)))


def cnn() -> Run:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Sequential(*(Residual(16) for _ in range(3))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, lambda step: F.cross_entropy(model(_images(step)[0]), _images(step)[1])


class Vit(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, Mlp(width), False) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def vit() -> Run:
    model = Vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, lambda step: F.cross_entropy(model(_images(step)[0]), _images(step)[1])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.cells = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.cells(self.embed(tokens))[0]))


def lstm() -> Run:
    model = Lstm()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(step: int) -> torch.Tensor:
        tokens = _text(step)
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return model, optimizer, loss


def autoencoder() -> Run:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 192), nn.Sigmoid()),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(step: int) -> torch.Tensor:
        images = (_images(step)[0].flatten(1) > 0.5).float()
        return F.binary_cross_entropy(model(images), images)

    return model, optimizer, loss


def gan() -> Run:
    generator = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 192), nn.Tanh())
    judge = nn.Sequential(nn.Linear(192, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    model = nn.ModuleDict({"generator": generator, "judge": judge})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.5, 0.9))

    def loss(step: int) -> torch.Tensor:
        real = _images(step)[0].flatten(1).clamp(-1, 1)
        made = generator(torch.randn(32, 8, generator=torch.Generator().manual_seed(step)))
        judged = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(real)).mean()
        judge.requires_grad_(False)
        fooled = F.softplus(-judge(made)).mean()
        judge.requires_grad_(True)
        return judged + fooled

    return model, optimizer, loss


def byol(stopped: bool) -> Run:
    """Two views of one batch; without the stopped gradient the encoder collapses."""
    encoder = nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 16))
    predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(step: int) -> torch.Tensor:
        x = _images(step)[0].flatten(1)
        generator = torch.Generator().manual_seed(step)
        views = [encoder(x + 0.2 * torch.randn(x.shape, generator=generator)) for _ in range(2)]
        target = views[1].detach() if stopped else views[1]
        found = (predictor(views[0]) - target).square().mean()
        if stopped:  # and a term for the variance, as in VICReg
            found = found + F.relu(1 - views[0].std(0)).mean()
        return found

    return model, optimizer, loss


def mlp(activation: type[nn.Module]) -> Run:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 64)]
    for _ in range(3):
        layers += [activation(), nn.Linear(64, 64)]
    model = nn.Sequential(*layers, activation(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, lambda step: F.cross_entropy(model(_images(step)[0]), _images(step)[1])


HEALTHY: dict[str, Callable[[], Run]] = {
    "gpt": language,
    "moe": lambda: language(moe=True),
    "cnn": cnn,
    "vit": vit,
    "lstm": lstm,
    "autoencoder": autoencoder,
    "gan": gan,
    "byol": lambda: byol(stopped=True),
    "relu": lambda: mlp(nn.ReLU),
    "sigmoid": lambda: mlp(nn.Sigmoid),
}

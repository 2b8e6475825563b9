"""Images: segmentation, detection, mixer, masked and self-distilled training, radiance field."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.generative import mlp
from benchmarks.alarms.kinds.setup import Batch, Setup, seeded

SIDE = 16


def shapes(step: int, seed: int, size: int = 16) -> tuple[torch.Tensor, ...]:
    """Return noisy pictures of a box or a disc, its mask, its class and its corners."""
    at = seeded(seed, step, 41)
    kind = torch.randint(0, 2, (size,), generator=at)
    center = 5 + 6 * torch.rand(size, 2, generator=at)
    radius = 2 + 2.5 * torch.rand(size, 1, 1, generator=at)
    axis = torch.arange(SIDE).float()
    dx = (axis[None, :, None] - center[:, :1, None]).expand(size, SIDE, SIDE)
    dy = (axis[None, None] - center[:, 1:, None]).expand(size, SIDE, SIDE)
    disc = (dx**2 + dy**2).sqrt() < radius
    box = torch.maximum(dx.abs(), dy.abs()) < radius
    mask = torch.where(kind[:, None, None] == 1, disc, box).float()
    image = mask + 0.4 * torch.randn(mask.shape, generator=at)
    return image[:, None], mask[:, None], kind, torch.cat([center, radius[:, :, 0]], 1) / SIDE


def bars(step: int, seed: int, size: int = 32, classes: int = 4) -> tuple[torch.Tensor, ...]:
    """Return noisy gratings and the class of their direction."""
    at = seeded(seed, step, 42)
    label = torch.randint(0, classes, (size,), generator=at)
    angle = (torch.pi / classes * label)[:, None, None]
    axis = torch.arange(8).float() - 3.5
    along = angle.cos() * axis[:, None] + angle.sin() * axis
    phase = 6.28 * torch.rand(size, 1, 1, generator=at)
    picture = (1.5 * along + phase).sin() + 0.7 * torch.randn(size, 8, 8, generator=at)
    return picture[:, None], label


class UNet(nn.Module):
    """Two scales with a path around the coarse one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = _double(1, width)
        self.middle = _double(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge = _double(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a logit for each pixel."""
        fine = self.down(x)
        coarse = self.up(self.middle(F.max_pool2d(fine, 2)))
        out: torch.Tensor = self.head(self.merge(torch.cat([fine, coarse], 1)))
        return out


def _double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(2, outside),
        nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.GroupNorm(2, outside),
        nn.SiLU(),
    )


def unet(seed: int = 0, width: int = 6, dice: float = 1.0, **training: Any) -> Setup:
    """Segment shapes by cross entropy and overlap."""
    torch.manual_seed(seed)
    net = UNet(width)

    def loss(given: Batch) -> torch.Tensor:
        logit, mask = net(given[0]), given[1]
        found = logit.sigmoid()
        overlap = 2 * (found * mask).sum((1, 2, 3)) + 1
        overlap = overlap / (found.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logit, mask) + dice * (1 - overlap).mean()

    return plain(net, lambda step: shapes(step, seed)[:2], loss, **training)


class Detector(nn.Module):
    """A trunk with heads for class and box."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()
        )
        self.classes = nn.Linear(256, 2)
        self.box = nn.Linear(256, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and box."""
        z = self.trunk(x).flatten(1)
        return self.classes(z), self.box(z)


def detector(seed: int = 0, weight: float = 5.0, **training: Any) -> Setup:
    """Add a focal loss of the class to a robust loss of the box."""
    torch.manual_seed(seed)
    net = Detector()

    def batch(step: int) -> Batch:
        picture, _, kind, box = shapes(step, seed)
        return picture, kind, box

    def loss(given: Batch) -> torch.Tensor:
        logit, box = net(given[0])
        each = F.cross_entropy(logit, given[1], reduction="none")
        focal = ((1 - (-each).exp()) ** 2 * each).mean()
        return focal + weight * F.smooth_l1_loss(box, given[2], beta=0.1)

    return plain(net, batch, loss, **{"lr": 2e-3, **training})


class MixerBlock(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = mlp(patches, 2 * patches, patches)
        self.channels = mlp(width, 2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both with the input."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches of 2 x 2 through mixer blocks."""

    def __init__(self, depth: int, width: int = 20, outputs: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.layers = nn.ModuleList([MixerBlock(16, width) for _ in range(depth)])
        self.head = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.patch(F.unfold(x, 2, stride=2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def mixer(seed: int = 0, depth: int = 4, smoothing: float = 0.0, **training: Any) -> Setup:
    """Classify gratings with an MLP-Mixer."""
    torch.manual_seed(seed)
    net = Mixer(depth)

    def loss(given: Batch) -> torch.Tensor:
        return F.cross_entropy(net(given[0]), given[1], label_smoothing=smoothing)

    return plain(net, lambda step: bars(step, seed), loss, **training)


class MaskedAutoencoder(nn.Module):
    """Encodes patches of which many are hidden, and decodes them all."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.hidden = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 48, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.decode = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, hide: torch.Tensor) -> torch.Tensor:
        """Return all patches."""
        z = torch.where(hide[..., None], self.hidden, self.patch(x)) + self.position
        out: torch.Tensor = self.decode(self.encoder(z))
        return out


def masked_autoencoder(seed: int = 0, share: float = 0.6, **training: Any) -> Setup:
    """Reconstruct hidden patches of gratings."""
    torch.manual_seed(seed)
    net = MaskedAutoencoder()

    def batch(step: int) -> Batch:
        patches = F.unfold(bars(step, seed)[0], 2, stride=2).transpose(1, 2)
        return patches, torch.rand(32, 16, generator=seeded(seed, step, 5)) < share

    def loss(given: Batch) -> torch.Tensor:
        patches, hide = given
        return ((net(patches, hide) - patches) ** 2)[hide].mean()

    return plain(net, batch, loss, **training)


def self_distillation(
    seed: int = 0, momentum: float = 0.99, center: bool = True, **training: Any
) -> Setup:
    """DINO-like: match a sharpened, centered teacher that is an average of the student."""
    torch.manual_seed(seed)
    net = mlp(64, 48, 48, 16, norm=True)
    teacher = deepcopy(net).requires_grad_(False)
    mean = torch.zeros(16)

    def batch(step: int) -> Batch:
        x = bars(step, seed)[0].flatten(1)
        at = seeded(seed, step, 6)
        views = [x + 0.4 * torch.randn(x.shape, generator=at) for _ in range(2)]
        return torch.stack(views)

    def loss(views: Batch) -> torch.Tensor:
        with torch.no_grad():
            aimed = teacher(views)
            wanted = ((aimed - mean) / 0.2).softmax(-1)
            if center:
                mean.lerp_(aimed.mean((0, 1)), 0.1)
        found = (net(views) / 0.5).log_softmax(-1)
        return -(wanted.flip(0) * found).sum(-1).mean()

    @torch.no_grad()
    def follow(_: int) -> None:
        for ours, theirs in zip(net.parameters(), teacher.parameters(), strict=True):
            theirs.lerp_(ours, 1 - momentum)

    return plain(net, batch, loss, after_step=follow, **{"lr": 1e-3, **training})


def pairs(seed: int = 0, temperature: float = 0.3, **training: Any) -> Setup:
    """SimCLR-like: recognize the other view among the batch; BatchNorm in the projection."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 24), nn.BatchNorm1d(24)
    )

    def batch(step: int) -> Batch:
        x = bars(step, seed)[0].flatten(1)
        at = seeded(seed, step, 7)
        return torch.cat([x + 0.5 * torch.randn(x.shape, generator=at) for _ in range(2)])

    def loss(views: Batch) -> torch.Tensor:
        z = F.normalize(net(views), dim=-1)
        alike = (z @ z.T / temperature).fill_diagonal_(-1e9)
        return F.cross_entropy(alike, torch.arange(len(z)).roll(len(z) // 2))

    return plain(net, batch, loss, **{"clip": None, **training})


def radiance(seed: int = 0, bands: int = 4, **training: Any) -> Setup:
    """Fit a picture from sine features of positions, as radiance fields are."""
    torch.manual_seed(seed)
    net = mlp(4 * bands, 48, 48, 48, 1, activation=nn.ReLU)

    def batch(step: int) -> Batch:
        x = 2 * torch.rand(256, 2, generator=seeded(seed, step, 8)) - 1
        return x, (4 * x[:, :1]).sin() * (3 * x[:, 1:]).cos() + (x.norm(dim=1, keepdim=True) < 0.5)

    def loss(given: Batch) -> torch.Tensor:
        x = torch.cat([given[0] * 2**i for i in range(bands)], 1)
        return F.mse_loss(net(torch.cat([x.sin(), x.cos()], 1)), given[1])

    return plain(net, batch, loss, **{"clip": None, "lr": 2e-3, **training})

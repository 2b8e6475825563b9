"""Models that `transformers` does not have: a ResNet, an LSTM, a recommender."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """Two residual blocks for each width, and a linear head."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        inside = widths[0]
        for width in widths:
            blocks += [ResidualBlock(inside, width, 2), ResidualBlock(width, width, 1)]
            inside = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits of the classes."""
        logits: torch.Tensor = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        return logits


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM, and an output head of its own."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of the next word at each position."""
        logits: torch.Tensor = self.head(self.lstm(self.embedding(ids))[0])
        return logits


class Recommender(nn.Module):
    """Large embeddings of users and items, and an MLP on both."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.mlp = nn.Sequential(
            nn.Linear(3 * width, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, 1),
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the score of each interaction."""
        user, item = self.users(users), self.items(items)
        score: torch.Tensor = self.mlp(torch.cat((user, item, user * item), dim=-1))
        return score.squeeze(-1)

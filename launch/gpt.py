"""A small GPT: pre-norm blocks, learned positions, causal attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """What fixes the parameters. A checkpoint fits a model of the same shape only."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    tied: bool = False
    residual: bool = True
    """False: what a branch computes replaces the stream instead of being added to it."""
    activation: str = "gelu"
    kinds: int = 0
    """Outputs of a second head, which `tasks` trains; 0: there is none."""
    dtype: str = "float32"
    """Of the parameters, and so of the optimizer's state."""


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width).

    The rows of `qkv` are ordered (head, q k v, element of the head), so that a run of rows that is
    held alone, as under tensor parallelism, is a number of whole heads.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class Mlp(nn.Module):
    """Four times wider inside."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Attention, then the MLP, each on a normalised copy of the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.residual = shape.residual
        self.norm1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._joined(x, self.attn(self.norm1(x)))
        return self._joined(x, self.mlp(self.norm2(x)))

    def _joined(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return x + branch if self.residual else branch


class GPT(nn.Module):
    """Byte ids (batch, time) to logits (batch, time, vocabulary); `time` is at most the context.

    With a second head, its outputs follow those of the first in the last dimension.
    """

    def __init__(self, shape: Shape, init_std: float = 0.02) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.kinds:
            self.kind = nn.Linear(shape.width, shape.kinds, bias=False)
        self._initialise(init_std)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.to(getattr(torch, shape.dtype))

    def _initialise(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
        # The residual stream sums 2 x layers branches; so its variance does not grow with depth.
        residual_std = std / math.sqrt(2 * self.shape.layers)
        for block in self.blocks:
            nn.init.normal_(block.attn.out.weight, std=residual_std)
            nn.init.normal_(block.mlp.down.weight, std=residual_std)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = embedded(ids, self.embed, self.positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return torch.cat([self.head(x), self.kind(x)], -1) if self.shape.kinds else self.head(x)


def embedded(ids: torch.Tensor, embed: nn.Module, positions: nn.Module) -> torch.Tensor:
    """What the first block gets: every byte's vector plus that of its position."""
    return embed(ids) + positions(torch.arange(ids.shape[1], device=ids.device))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, in float32 whatever the logits are."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

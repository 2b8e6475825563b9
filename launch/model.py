"""A small GPT on bytes: pre-norm blocks, learned positions, causal attention, and its loss."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}
KINDS = (string.ascii_letters, string.digits, " \t", "\r\n", "()[]{}")  # all others are one more
KIND_COUNT = len(KINDS) + 1


@dataclass(frozen=True)
class Shape:
    """What determines the parameters. A checkpoint fits a model of the same shape only."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    vocabulary: int = VOCABULARY
    tied: bool = False
    residual: bool = True
    """False: the output of a branch replaces the residual stream instead of being added to it."""
    activation: str = "gelu"
    kinds: int = 0
    """Outputs of a second head, which predicts the kind of the next character; 0: no such head."""
    dtype: str = "float32"
    """Of the parameters, and so of the optimizer's state."""


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width).

    The rows of `qkv` are ordered (head, q k v, element of the head), so that a rank that holds
    consecutive rows, as under tensor parallelism, holds whole heads.
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


class Mlp(nn.Module):
    """Two matrices, four times wider inside."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Attention, then the MLP, each on a normalized copy of the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.residual = shape.residual
        self.norm1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.attn(self.norm1(x))
        x = x + branch if self.residual else branch
        branch = self.mlp(self.norm2(x))
        return x + branch if self.residual else branch


class GPT(nn.Module):
    """Byte ids (batch, time) to logits (batch, time, vocabulary); `time` is at most the context.

    The outputs of a second head follow those of the first in the last dimension. A pipeline stage
    lacks some blocks, and the embeddings or the head: it gets or returns activations instead.
    """

    def __init__(self, shape: Shape, init_std: float = 0.02) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.kinds:
            self.kind = nn.Linear(shape.width, shape.kinds, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=init_std)
        # The residual stream sums 2 x layers branches; its variance should not grow with depth.
        for block in self.blocks.values():
            for last in (block.attn.out, block.mlp.down):
                nn.init.normal_(last.weight, std=init_std / math.sqrt(2 * shape.layers))
        if shape.tied:
            self.head.weight = self.embed.weight
        self.to(getattr(torch, shape.dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids
        if self.embed is not None:
            x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return x
        x = self.norm(x)
        return torch.cat([self.head(x), self.kind(x)], -1) if self.shape.kinds else self.head(x)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per byte, in float32 whatever the logits are."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class TaskLosses:
    """The loss of each task: the next byte and, with a `kind_weight`, what kind of character it is.

    The last `KIND_COUNT` outputs of the model are then those of the second head.
    """

    def __init__(self, kind_weight: float | None, device: torch.device | None = None) -> None:
        self.kind_weight = kind_weight
        self.kind_of_byte = torch.full((VOCABULARY,), len(KINDS))
        for number, characters in enumerate(KINDS):
            self.kind_of_byte[list(characters.encode())] = number
        self.kind_of_byte = self.kind_of_byte.to(device)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weighted loss of each task; the model is trained on their sum."""
        if self.kind_weight is None:
            return {"byte": cross_entropy(outputs, targets)}
        logits, kinds = outputs.tensor_split([-KIND_COUNT], dim=-1)
        return {
            "byte": cross_entropy(logits, targets),
            "kind": cross_entropy(kinds, self.kind_of_byte[targets]) * self.kind_weight,
        }

"""A decoder of any shape, and its matrix products written out one by one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distmon.collect.telemetry.mfu.formula import TransformerShape

GPT2 = TransformerShape(layers=12, width=768, heads=12, context=1024, vocabulary=50257)
GPT2_XL = TransformerShape(layers=48, width=1600, heads=25, context=1024, vocabulary=50257)
LLAMA_7B = TransformerShape(
    layers=32, width=4096, heads=32, context=4096, vocabulary=32000, mlp=11008, gated=True
)
LLAMA_70B = TransformerShape(
    layers=80,
    width=8192,
    heads=64,
    kv_heads=8,
    head_size=128,
    context=4096,
    vocabulary=32000,
    mlp=28672,
    gated=True,
)
# Attention is a third of its FLOPs, so that a count without it is far off.
SMALL = TransformerShape(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_size=16,
    context=128,
    vocabulary=64,
    mlp=80,
    gated=True,
)


class Attention(nn.Module):
    def __init__(self, shape: TransformerShape, mask: str) -> None:
        super().__init__()
        self.heads, self.mask = shape.heads, mask
        self.kv_heads = shape.kv_heads or shape.heads
        self.size = shape.head_size or shape.width // shape.heads
        self.q = nn.Linear(shape.width, self.heads * self.size, bias=False)
        self.k = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=torch.ones(x.shape[1], x.shape[1]) if self.mask == "given" else None,
            is_causal=self.mask == "causal",
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape: TransformerShape, mask: str) -> None:
        super().__init__()
        inner = shape.mlp or 4 * shape.width
        self.attention = Attention(shape, mask)
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, inner, bias=False)
        self.gate = nn.Linear(shape.width, inner, bias=False) if shape.gated else None
        self.down = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        inner = F.silu(self.up(x))
        return x + self.down(inner * self.gate(x) if self.gate is not None else inner)


class Decoder(nn.Module):
    """Token ids (batch, time) to logits. `recompute` is None, `reentrant` or `non-reentrant`."""

    def __init__(
        self, shape: TransformerShape, mask: str = "causal", recompute: str | None = None
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, mask) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def train(model: nn.Module, ids: torch.Tensor, micro_batches: int = 1) -> None:
    """Forward and backward of all sequences, in so many parts."""
    for part in ids.chunk(micro_batches):
        model(part).sum().backward()


def products(shape: TransformerShape) -> Iterator[tuple[int, int, int]]:
    """(rows, inner, columns) of every matrix product in a forward pass of one sequence."""
    size = shape.head_size or shape.width // shape.heads
    inner = shape.mlp or 4 * shape.width
    for _ in range(shape.layers):
        yield shape.context, shape.width, shape.heads * size  # queries
        for _ in ("keys", "values"):
            yield shape.context, shape.width, (shape.kv_heads or shape.heads) * size
        for _ in range(shape.heads):
            yield shape.context, size, shape.context  # scores
            yield shape.context, shape.context, size  # mix of values
        yield shape.context, shape.heads * size, shape.width  # output of attention
        for _ in range(2 if shape.gated else 1):
            yield shape.context, shape.width, inner
        yield shape.context, inner, shape.width
    yield shape.context, shape.width, shape.vocabulary

"""The models that are trained: shapes of real ones, and shapes that show how costs grow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


class Gpt2Block(nn.Module):
    """LayerNorm, causal attention, LayerNorm, MLP; biases everywhere."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + hidden


class Gpt2(nn.Module):
    """GPT-2: learned positions, and the output head is the embedding. 124M and 148 tensors."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 50257,
        context: int = 1024,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        small_embeddings(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)


class LlamaBlock(nn.Module):
    """RMSNorm, attention with grouped keys and rotated positions, RMSNorm, gated MLP; no biases."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1 = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.out(attend(self.q(h), self.k(h), self.v(h), self.head))
        h = self.norm2(x)
        hidden: torch.Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + hidden


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int) -> torch.Tensor:
    """Causal attention with rotated positions and grouped keys, all (batch, time, heads * head)."""
    q, k, v = (each.unflatten(-1, (-1, head)).transpose(1, 2) for each in (q, k, v))
    q, k = rotate(q), rotate(k)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions for (batch, heads, time, head)."""
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Decoder(nn.Module):
    """Blocks between an embedding and a norm; the output head is the embedding."""

    def __init__(self, vocabulary: int, width: int, blocks: Iterator[nn.Module]) -> None:
        """`blocks` are made after the embedding."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        small_embeddings(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Llama(Decoder):
    """The shape of Llama 3.2 1B: 1.24 billion elements in 146 tensors."""

    def __init__(
        self,
        layers: int = 16,
        width: int = 2048,
        heads: int = 32,
        kv_heads: int = 8,
        hidden: int = 8192,
        vocabulary: int = 128256,
    ) -> None:
        blocks = (LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        super().__init__(vocabulary, width, blocks)


class MoeBlock(nn.Module):
    """A router that sends each token to two of many experts; each expert is two tensors."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if len(token):  # an expert without tokens gets no gradient
                share = weights[token, place].unsqueeze(-1)
                mixed = mixed.index_add(0, token, share * down(F.silu(up(h[token]))))
        return x + mixed


class Moe(nn.Module):
    """Blocks of experts, few of which work in a step."""

    def __init__(
        self, layers: int = 8, width: int = 256, hidden: int = 512, experts: int = 32
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoeBlock(width, hidden, experts) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MatrixBlock(nn.Module):
    """Ten square matrices around a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, x.shape[-1:])
        for matrix in self.matrices:
            h = F.linear(h, matrix)
        return x + h


class Matrices(nn.Module):
    """Any number of equal matrices, ten to a block, so that one thing can be varied at a time."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MatrixBlock(width) for _ in range(tensors // 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OneTensor(nn.Module):
    """A single matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix)


def small_embeddings(model: nn.Module) -> None:
    """As language models begin; torch's own are 50 times larger and saturate a tied head."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

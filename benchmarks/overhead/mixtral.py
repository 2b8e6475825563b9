"""A language model whose MLPs are mixtures of experts, in the manner of Mixtral."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.overhead.models import Decoder, attend

CHOSEN = 2
"""Experts that a token is sent to."""


class Attention(nn.Module):
    """Causal attention with grouped keys and rotated positions; no biases."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(attend(self.q(x), self.k(x), self.v(x), self.head))
        return output


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class SparseMlp(nn.Module):
    """A router that sends each token to two experts."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        logits, chosen = self.gate(tokens).topk(CHOSEN)
        shares = logits.softmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                share = shares[token, place].unsqueeze(-1)
                mixed = mixed.index_add(0, token, share * expert(tokens[token]))
        return mixed.view_as(x)


class MixtralBlock(nn.Module):
    """RMSNorm, attention, RMSNorm, experts."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(width), SparseMlp(width, hidden, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        output: torch.Tensor = x + self.mlp(self.norm2(x))
        return output


class Mixtral(Decoder):
    """Mixtral at an eighth of its width and layers: 8 experts, 3.5 times as wide inside."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 512,
        heads: int = 8,
        kv_heads: int = 2,
        hidden: int = 1792,
        experts: int = 8,
        vocabulary: int = 32000,
    ) -> None:
        blocks = (MixtralBlock(width, heads, kv_heads, hidden, experts) for _ in range(layers))
        super().__init__(vocabulary, width, blocks)

"""A small GPT in standard parametrization and in muP, for trying the check and as an example.

muP as in "Tensor Programs V", for Adam: hidden matrices are initialized with variance 1 / fan-in
and learn at rate / (width / base); the head is initialized alike at every width, and its output
divided by width / base; attention divides by the size of a head instead of its root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distmon.coordcheck.workload import WidthWorkload

VOCABULARY, LENGTH, HEADS, LAYERS, BASE = 64, 16, 4, 3, 128
RATE = 2e-3


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, mup: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        head, base = width // HEADS, BASE // HEADS
        self.scale = math.sqrt(base) / head if mup else 1 / math.sqrt(head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        output: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


class Gpt(nn.Module):
    """Token and position embedding, blocks, norm, and a head of its own."""

    def __init__(self, width: int, mup: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, mup) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.shrink = BASE / width if mup else 1.0
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.5 if "embed" in name or "positions" in name else parameter.shape[1] ** -0.5
                if mup and name == "head.weight":
                    std = BASE**-0.5  # not of this width: the multiplier is what scales it
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(self.norm(x) * self.shrink)
        return output


def gpt(width: int, mup: bool) -> WidthWorkload:
    """Return the built-in GPT of a width."""
    if width % HEADS:
        raise ValueError(f"the width must be a multiple of {HEADS}, not {width}")
    model = Gpt(width, mup)
    hidden = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is h for h in hidden)]
    rate = RATE * BASE / width if mup else RATE
    optimizer = torch.optim.Adam(
        [{"params": hidden, "lr": rate}, {"params": others, "lr": RATE}], betas=(0.9, 0.95)
    )
    return WidthWorkload(model, _batch, _loss, optimizer)


BUILT_IN: dict[str, Callable[[int], Any]] = {
    "standard": lambda width: gpt(width, mup=False),
    "mup": lambda width: gpt(width, mup=True),
}


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (16, 1), generator=generator)
    return (start + 5 * torch.arange(LENGTH)) % VOCABULARY


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

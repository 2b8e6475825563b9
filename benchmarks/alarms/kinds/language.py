"""Sequences: GPT, BERT, encoder and decoder, recurrent models, mixture of experts, LoRA."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.kinds.setup import (
    Batch,
    Orthogonal,
    Schedule,
    Setup,
    constant,
    optimizer_of,
    seeded,
)

VOCAB = 48
CONTEXT = 24


@lru_cache
def text() -> torch.Tensor:
    """Return 20 000 tokens of a Markov chain whose frequencies differ as those of words do."""
    random = np.random.default_rng(5)
    table = random.dirichlet(0.08 / np.arange(1, VOCAB + 1) ** 0.5 * 4, size=VOCAB).cumsum(1)
    tokens, now = [], 0
    for draw in random.random(20_000):
        now = min(VOCAB - 1, int(np.searchsorted(table[now], draw)))
        tokens.append(now)
    return torch.tensor(tokens)


def windows(step: int, seed: int, size: int, length: int = CONTEXT + 1) -> torch.Tensor:
    """Return [size, length] tokens from random places."""
    starts = torch.randint(0, 19_000, (size, 1), generator=seeded(seed, step))
    return text()[starts + torch.arange(length)]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier tokens."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Experts(nn.Module):
    """Top-1 routing to small MLPs, with the usual loss for an even load."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token to its best expert."""
        share = self.router(x).softmax(-1)
        weight, chosen = share.max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                y[mine] = weight[mine, None] * expert(x[mine])
        load = F.one_hot(chosen, share.shape[-1]).float().mean((0, 1))
        self.balance = share.shape[-1] * (load * share.mean((0, 1))).sum()
        return y


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, moe: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp: nn.Module = (
            Experts(width)
            if moe
            else nn.Sequential(
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
                nn.Dropout(dropout),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Blocks under `blocks`."""

    def __init__(
        self, depth: int = 2, width: int = 32, moe: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList([Block(width, moe, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.frozen(x) + x @ self.a.T @ self.b.T


class Recurrent(nn.Module):
    """An LSTM or GRU over characters."""

    def __init__(self, cell: str, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = (nn.LSTM if cell == "lstm" else nn.GRU)(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.rnn(self.embed(tokens))[0])


class EncoderDecoder(nn.Module):
    """A small encoder-decoder that reverses its input."""

    def __init__(self, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, CONTEXT, width))
        self.body = nn.Transformer(
            width, 4, depth, depth, 2 * width, 0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits of the target."""
        s, t = source.shape[1], target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        x = self.embed(source) + self.position[:, :s]
        y = self.embed(target) + self.position[:, :t]
        return self.head(self.body(x, y, tgt_mask=mask, tgt_is_causal=True))


def language(
    model: str = "gpt",
    optimizer: str = "adamw",
    lr: float = 3e-3,
    depth: int = 2,
    width: int = 32,
    schedule: Schedule = constant,
    clip: float | None = 1.0,
    dropout: float = 0.0,
    batch_size: int = 16,
    accumulate: int = 1,
    decay: float = 0.01,
    dtype: str = "float32",
    scale: float = 1.0,
    evaluate_every: int = 0,
    tokens: int = 0,
    lengthen: bool = False,
    seed: int = 0,
) -> Setup:
    """Train on the text; `tokens` limits the data, `lengthen` trains on short windows first."""
    torch.manual_seed(seed)
    nets: dict[str, nn.Module] = {}
    if model in ("lstm", "gru"):
        nets["net"] = Recurrent(model, depth, width)
    elif model == "t5":
        nets["net"] = EncoderDecoder(depth=depth)
    else:
        nets["net"] = Gpt(depth, width, model == "moe", dropout)
    net = nets["net"].to(getattr(torch, dtype))
    if model == "lora":
        net.requires_grad_(False)
        assert isinstance(net, Gpt)
        for block in net.blocks:
            attention: Attention = block.attention  # type: ignore[assignment]
            attention.qkv = LowRank(attention.qkv)  # type: ignore[assignment]
    if optimizer == "muon":
        inner = [p for n, p in net.named_parameters() if p.ndim == 2 and "blocks" in n]
        known = {id(p) for p in inner}
        others = [p for p in net.parameters() if id(p) not in known]
        optimizers = [Orthogonal(inner, lr), optimizer_of("adamw", others, 3e-3)]
    else:
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizers = [optimizer_of(optimizer, trained, lr, decay)]

    def batch(step: int) -> Batch:
        x = windows(step % tokens if tokens else step, seed, batch_size)
        return x[:, : 9 if step < 150 else CONTEXT + 1] if lengthen else x

    def loss(x: Batch) -> torch.Tensor:
        if model == "t5":
            source = x[:, :12]
            target = torch.cat([torch.zeros_like(source[:, :1]), source.flip(1)], 1)
            logits, wanted = net(source, target[:, :-1]), target[:, 1:]
        elif model == "bert":
            hidden = torch.rand(x.shape, generator=seeded(int(x.sum()))) < 0.2
            logits, wanted = net(x[:, :CONTEXT].masked_fill(hidden[:, :CONTEXT], 0)), x[:, :CONTEXT]
        else:
            logits, wanted = net(x[:, :-1]), x[:, 1:]
        value = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
        if model == "moe":
            value = value + 0.01 * sum(b.mlp.balance for b in net.blocks)  # type: ignore
        return scale * value

    @torch.no_grad()
    def validate() -> float:
        was = net.training
        net.eval()
        value = loss(windows(10**6, seed, 64)).item()
        net.train(was)
        return value

    return Setup(
        [net], optimizers, batch, loss, schedule, clip, accumulate, validate, evaluate_every
    )

"""The built-in model of `distmon verify`: small, and full of corner cases.

It has a parameter for every way to sample a tensor (`distmon/sampling/designs.py`), sizes that do
not divide by the number of ranks, a first dimension of 1 (most ranks then hold none of it), a
frozen module, and a trainable one that no optimizer owns. Every trainable parameter gets a gradient
that is not zero. Inside of it there are a saturated activation, dead units and a dead expert.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from distmon.verify.parallelisms.workload import Workload

VOCABULARY = 101
WIDTH = 48
HEAD_WIDTH = 6
HIDDEN = 347
TOKENS = 16
EXAMPLES = 16
EXPERTS = 5
DEAD_UNITS = 6


def example_workload() -> Workload:
    """Return the built-in model in float64 with its data; the caller sets the seed."""
    model = ExampleModel().double()
    return Workload(model, _batch, _next_token_loss, without_optimizer=("offset",))


class ExampleModel(nn.Sequential):
    """A transformer as a sequence of layers, so that it can be split into pipeline stages."""

    def __init__(self) -> None:
        blocks = ("block0", "block1")
        frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        layers: list[tuple[str, nn.Module]] = [
            ("embed", TokensAndPairs()),
            ("frozen", frozen),
            ("gate", Gate()),
            ("mixture", Mixture()),
            ("offset", Offset()),
            *((name, Block()) for name in blocks),
            ("norm", nn.LayerNorm(WIDTH)),
            ("head", nn.Linear(WIDTH, VOCABULARY)),
        ]
        super().__init__(OrderedDict(layers))
        self.tensor_parallel_plan = {
            f"{block}.{path}": style for block in blocks for path, style in _columns_and_rows()
        }
        self.sequence_parallel_plan = _sequence_plan(blocks)


class TokensAndPairs(nn.Embedding):
    """Embeds each token, and each pair of neighboring tokens in hashed tables.

    The shapes are those from which on gradients (g) and updates (u) are sampled in each way; the
    comments say how many of how many elements are read.
    """

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        generator = torch.Generator().manual_seed(1)  # leaves the other weights as they were

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.1 * torch.randn(shape, generator=generator))

        # g: 3 of the 5 runs in every row, the last of which is short; u: a run in every row.
        self.tall = table(24_593, 36)
        # g: 1024 of 1547 runs; u: 8 of the 12 elements in every row.
        self.narrow = table(1031, WIDTH - 36)
        # g: a run in every 8 columns, in 8 of the 11 rows; u: 128 runs.
        self.wide = table(11, 4101)
        # g: in full; u: a single one of the 6 elements in every row.
        self.short_rows = table(4099, 2, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pairs = tokens + VOCABULARY * tokens.roll(1, -1)
        found = [
            functional.embedding(pairs % len(table), table)
            for table in (self.tall, self.narrow, self.wide.T)
        ]
        scale = 1 + self.short_rows[pairs % len(self.short_rows)].sum((-2, -1))
        both = torch.cat(found[:2], -1) * scale[..., None]
        added = functional.pad(found[2], (0, WIDTH - len(self.wide)))
        return super().forward(tokens) + both + added


class Gate(nn.Module):
    """A parameter with a first dimension of 1: under most shardings only one rank holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, WIDTH) + 0.5)
        self.squash = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x * self.scale + self.squash(4 * x)
        return output


class Experts(nn.Module):
    """One parameter for all experts, so that it gets a gradient though one of them is never used.

    Some units are zero in every expert.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        scale = 1 + 0.1 * torch.randn(EXPERTS, WIDTH, generator=generator)
        scale[:, :DEAD_UNITS] = 0
        self.scale = nn.Parameter(scale)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.act(x.unsqueeze(-2) * self.scale)
        return (made * shares.unsqueeze(-1)).sum(-2)


class Router(nn.Linear):
    """Returns the logits of all experts; the last one is never chosen."""

    def __init__(self) -> None:
        super().__init__(WIDTH, EXPERTS - 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(super().forward(x), (0, 1), value=-math.inf)


class Mixture(nn.Module):
    """Prefers two experts for every token.

    Their shares are those of all experts: with the two largest alone, rounding to bfloat16 would
    send some tokens to another expert, and the model would train differently.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.num_experts, self.top_k = EXPERTS, 2
        with torch.random.fork_rng(devices=[]):  # leaves the other weights as they were
            self.router = Router()
        nn.init.normal_(self.router.weight, std=WIDTH**-0.5, generator=generator)
        self.experts = Experts(generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.experts(x, self.router(x).softmax(-1))
        return output


class Offset(nn.Module):
    """A trainable parameter that no optimizer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Attention(nn.Module):
    """Causal attention with separate projections.

    Keys have no bias: it would cancel in the softmax, and its gradient be rounding noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The number of heads is local: under tensor parallelism each rank has some of them.
        q, k, v = (
            linear(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        output: torch.Tensor = x + self.mlp(self.norm2(x))
        return output


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (EXAMPLES, TOKENS), generator=generator)


def _next_token_loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def _columns_and_rows(rows_to: Replicate | Shard | None = None) -> list[tuple[str, ParallelStyle]]:
    """Return the plan of one block; `rows_to` is the placement of the outputs."""
    layout = rows_to or Replicate()
    return [
        *((f"attention.{name}", ColwiseParallel()) for name in ("q", "k", "v")),
        ("attention.out", RowwiseParallel(output_layouts=layout)),
        ("mlp.up", ColwiseParallel(use_local_output=False)),
        ("mlp.down", RowwiseParallel(output_layouts=layout)),
    ]


def _sequence_plan(blocks: tuple[str, ...]) -> dict[str, ParallelStyle]:
    """Return the plan in which activations between blocks are sharded along the sequence."""
    part, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "offset": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=part),
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(
            input_layouts=part, desired_input_layouts=whole, use_local_output=True
        ),
    }
    for block in blocks:
        for norm in ("norm1", "norm2"):
            plan[f"{block}.{norm}"] = SequenceParallel()
        for layer in ("attention", "mlp"):
            plan[f"{block}.{layer}"] = PrepareModuleInput(
                input_layouts=part, desired_input_layouts=whole, use_local_output=True
            )
        plan |= {f"{block}.{path}": style for path, style in _columns_and_rows(rows_to=part)}
    return plan

"""What is trained while contenders observe, by name."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.overhead.models import Gpt2, Llama, Matrices, Moe, OneTensor
from distmon.bench.training import Workload


def language_loss(
    batch: int, length: int, vocabulary: int, model: nn.Module, device: torch.device
) -> torch.Tensor:
    """Return the cross-entropy of the next token on random text."""
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def square_loss(rows: int, width: int, model: nn.Module, device: torch.device) -> torch.Tensor:
    """Return the mean square of the output on noise."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(rows, width, device=device).to(dtype)
    out: torch.Tensor = model(x)
    return out.float().square().mean()


def matrices(name: str, tensors: int, width: int, rows: int = 8) -> Workload:
    """Return a workload of equal square matrices."""
    return Workload(
        name,
        f"{tensors} matrices of {width}x{width}, {rows} rows",
        partial(Matrices, tensors, width),
        partial(square_loss, rows, width),
        elements=tensors * width**2,
        growth=True,
    )


WORKLOADS: Final[tuple[Workload, ...]] = (
    Workload(
        "gpt2",
        "GPT-2 124M with a tied embedding, 1 sequence of 256 tokens",
        Gpt2,
        partial(language_loss, 1, 256, 50257),
        partial(language_loss, 1, 8, 50257),
        elements=124_439_808,
    ),
    Workload(
        "llama-1b",
        "the shape of Llama 3.2 1B, 1 sequence of 64 tokens",
        Llama,
        partial(language_loss, 1, 64, 128256),
        partial(language_loss, 1, 8, 128256),
        elements=1_235_814_400,
    ),
    matrices("tensors-100", 100, 64),
    matrices("tensors-1000", 1000, 64),
    matrices("tensors-10000", 10_000, 64),
    matrices("elements-10m", 100, 320),
    matrices("elements-100m", 100, 1012),
    Workload(
        "huge",
        "one matrix of 10000x10000, 8 rows",
        partial(OneTensor, 10_000),
        partial(square_loss, 8, 10_000),
        elements=10**8,
        growth=True,
    ),
    Workload(
        "moe",
        "8 blocks of 32 experts (width 256, hidden 512), top 2, 128 tokens",
        Moe,
        partial(square_loss, 128, 256),
        elements=67_000_000,
        growth=True,
    ),
)


def find_workloads(names: list[str]) -> list[Workload]:
    """Return the workloads of these names, in their own order; a KeyError lists unknown names."""
    if unknown := set(names) - {workload.name for workload in WORKLOADS}:
        raise KeyError(", ".join(sorted(unknown)))
    return [workload for workload in WORKLOADS if workload.name in names]

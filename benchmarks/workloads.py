"""What is trained while contenders watch, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import nn

from distmon_benchmarks.models import Gpt2, Llama, Matrices, Moe, OneTensor

Dtype = Literal["fp32", "bf16"]
DTYPES: Final[dict[Dtype, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}

COPIES: Final = 7
"""Of the weights, that have to fit into memory: weights, gradients, two of AdamW, the clone of a
contender and that of the referee, and what is made for a moment."""


@dataclass(frozen=True)
class Workload:
    """A model and what a step of it is. Functions are such that another process can be given it."""

    name: str
    conditions: str
    """What has to be known to judge the numbers: the model and the batch."""
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.device], torch.Tensor]
    """A forward pass on a new batch."""
    small_loss: Callable[[nn.Module, torch.device], torch.Tensor] | None = None
    """The same on a smaller batch, for where nothing is timed."""
    elements: int = 0
    """About how many there are; what does not fit is not built. 0: it surely fits."""
    growth: bool = False
    """Made to show how costs grow: only those contenders take part for which that is asked."""

    def does_not_fit(self, dtype: Dtype, processes: int = 1) -> str | None:
        """Why there is not enough memory; None when there is, or when nobody knows."""
        available = available_bytes()
        needed = self.elements * DTYPES[dtype].itemsize * COPIES * processes
        if available is None or needed <= available:
            return None
        return f"needs about {needed / 1e9:.0f} GB of memory, {available / 1e9:.0f} GB are free"


def available_bytes() -> int | None:
    """Memory that is free, on the accelerator if there is one; None when the system hides it."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":") for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024


def language_loss(
    batch: int, length: int, vocabulary: int, model: nn.Module, device: torch.device
) -> torch.Tensor:
    """Cross-entropy of the next token on random text."""
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def square_loss(rows: int, width: int, model: nn.Module, device: torch.device) -> torch.Tensor:
    """Mean square of what the model makes of noise."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(rows, width, device=device).to(dtype)
    out: torch.Tensor = model(x)
    return out.float().square().mean()


def matrices(name: str, tensors: int, width: int, rows: int = 8) -> Workload:
    """Equal square matrices."""
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
    """The workloads of these names, in the order of the list; a KeyError names unknown ones."""
    if unknown := set(names) - {workload.name for workload in WORKLOADS}:
        raise KeyError(", ".join(sorted(unknown)))
    return [workload for workload in WORKLOADS if workload.name in names]

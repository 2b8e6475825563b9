"""Factories for `distmon verify --model verify_models:...`: valid ones and broken ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Batch = Callable[[int], torch.Tensor]


def rows_of(count: int) -> Batch:
    """Batches of `count` rows."""

    def batch(step: int) -> torch.Tensor:
        return torch.randn(count, 24, generator=torch.Generator().manual_seed(step))

    return batch


def sequence() -> tuple[nn.Module, Batch]:
    """A model that is a sequence of layers."""
    return nn.Sequential(nn.Linear(24, 60), nn.Tanh(), nn.Linear(60, 5)), rows_of(8)


class WithLoss(nn.Module):
    """A Hugging Face language model that returns its own loss, computed in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, labels=tokens).loss


def llama() -> tuple[nn.Module, Batch]:
    """A small Hugging Face Llama; its gradient norm is above 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4099,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
    )

    def batch(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, config.vocab_size, (8, 16), generator=generator)

    return WithLoss(LlamaForCausalLM(config)), batch


class KeyBias(nn.Module):
    """Attention with a bias on its keys, which cancels: its gradient is rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (4, 6))
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ x


def key_bias() -> tuple[nn.Module, Batch, Any]:
    """Return a model with its own loss."""
    return KeyBias(), rows_of(8), lambda output, batch: (output.sum(1) - batch[:, :6]).abs().mean()


class Tied(nn.Module):
    """Two children share a weight, so neither can be wrapped alone; one parameter has no module."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(24, 24), nn.Linear(24, 24)
        self.up.weight = self.down.weight
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(self.down(x))) * self.gain


def tied() -> tuple[nn.Module, Batch]:
    """Return a model that is no nn.Sequential and has no tensor-parallel plan."""
    return Tied(), rows_of(8)


class DiffersByRank(nn.Linear):
    """Computes a different function on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + (dist.get_rank() if dist.is_initialized() else 0))


def differs_by_rank() -> tuple[nn.Module, Batch]:
    """Return a model that trains, but differently from the unsharded one."""
    return nn.Sequential(nn.Linear(24, 30), DiffersByRank(30, 5)), rows_of(8)


class FailsOnce(nn.Linear):
    """Raises on rank 1 while the other ranks wait for it, until there is a file `marker`."""

    def __init__(self, marker: str) -> None:
        super().__init__(30, 5)
        self.marker = Path(marker)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("out of luck")
        return super().forward(x)


def fails_once(marker: str) -> tuple[nn.Module, Batch]:
    """Return a model that fails until the file `marker` exists."""
    return nn.Sequential(nn.Linear(24, 30), FailsOnce(marker)), rows_of(8)


class Dies(nn.Linear):
    """Ends its process without an exception."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 0:
            os.write(2, b"last line of stderr\n")
            os._exit(7)
        return super().forward(x)


def dies() -> tuple[nn.Module, Batch]:
    """Return a model that ends the process of rank 0."""
    return nn.Sequential(Dies(24, 30)), rows_of(8)


def odd_rows() -> tuple[nn.Module, Batch]:
    """Return a batch that does not divide by two ranks."""
    return nn.Linear(24, 2), rows_of(7)


def no_tuple() -> nn.Module:
    """Return a model without data."""
    return nn.Linear(24, 2)


def no_model() -> tuple[str, Batch]:
    """Return data without a model."""
    return "model", rows_of(8)


def raises() -> None:
    """Raise."""
    raise ValueError("no such dataset")


def wrong_shape() -> tuple[nn.Module, Batch]:
    """Return a model that does not fit its data."""
    return nn.Linear(25, 2), rows_of(8)


not_a_function = 3

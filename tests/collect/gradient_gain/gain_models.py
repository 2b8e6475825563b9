"""Small models with repeated blocks, and their gains by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12


class Block(nn.Module):
    """Residual inside, as in a transformer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head. `call` is how a block is called."""

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


class Checkpointed(Net):
    reentrant = False

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class ResidualOutside(Net):
    """The input of a block is used beside it too."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + block(x)


class NamedArguments(nn.Module):
    """Called by keywords, returns a tuple; the first tensor of it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(
        self, *, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return positions, {"hidden": self.inner(hidden)}


class ByKeyword(Net):
    def __init__(self) -> None:
        super().__init__(block=NamedArguments)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(positions=torch.arange(3.0), hidden=x)[1]["hidden"]


class InPlace(nn.Module):
    """Overwrites its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.nn.functional.relu(x, inplace=True))


def data(step: int, rows: int = 6) -> torch.Tensor:
    """The same batch for the same step."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gains_by_autograd(model: Net, *batches: torch.Tensor) -> list[float]:
    """Of each block, over the batches together; leaves the parameters' gradients alone."""
    ends: list[torch.Tensor] = []

    def entering(_: nn.Module, args: Any, kwargs: Any) -> None:
        ends.append(kwargs["hidden"] if kwargs else args[0])

    def leaving(_: nn.Module, __: Any, output: Any) -> None:
        ends.append(output[1]["hidden"] if isinstance(output, tuple) else output)

    handles = []
    for block in model.blocks:
        handles.append(block.register_forward_pre_hook(entering, with_kwargs=True))
        handles.append(block.register_forward_hook(leaving))
    total = sum(loss_of(model, batch) for batch in batches) / len(batches)
    for handle in handles:
        handle.remove()
    found = torch.autograd.grad(total, ends)
    squares = torch.stack([g.double().square().sum() for g in found]).view(len(batches), -1, 2)
    summed = squares.sum(0)
    return (summed[:, 0] / summed[:, 1]).sqrt().tolist()


def train(
    model: nn.Module,
    monitor: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[Any]:
    """Every record of a short training."""
    records: list[Any] = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(forward or model, data(step))
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
        last = monitor.last_record
        if last is not None and last not in records[-1:]:
            records.append(last)
    return records

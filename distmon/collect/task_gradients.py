"""Gradients of each task of a multi-task model on the parameters that the tasks share.

The gradient of a task's loss is computed without touching `.grad`, and a small sample of it is
kept. The gradient of the global batch is the mean over ranks, and the norm of a mean does not
follow from the norms of its terms: so the sampled elements are summed, then the norm is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distmon.errors import DistmonError
from distmon.layout import Shard
from distmon.sampling.sample import choose, hash48

SAMPLE_SIZE = 256
"""Elements of each shared parameter; a norm over all parameters needs few of each."""
MOST_TASKS = 16


@dataclass(frozen=True)
class Measured:
    """The sampled gradients of all tasks on this rank."""

    key: int
    """48 bits; equal on ranks that measured the same tasks on the same parameters."""
    names: tuple[str, ...]
    elements: torch.Tensor
    """float64 [tasks, elements], scaled so that their squares estimate those of all elements."""


class TaskGradients:
    """Measures the tasks' gradients on the parameters that are whole on this rank."""

    def __init__(self, shards: Sequence[Shard], seed: int) -> None:
        self._shards = shards
        self._seed = seed
        self._waiting: Measured | None = None

    def measure(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Compute the gradients of all losses; keeps their graphs and does not touch `.grad`."""
        if not 2 <= len(losses) <= MOST_TASKS:
            raise DistmonError(f"task_losses takes 2 to {MOST_TASKS} losses, not {len(losses)}")
        owned = [(s, s.parameter) for s in self._shards if s.requires_grad()]
        trained = [s for s, parameter in owned if parameter is not None]
        if any(s.sharding != "whole" for s in trained):
            raise DistmonError(
                "task_losses needs parameters that are whole on every rank, not sharded"
            )
        names = tuple(sorted(losses))
        inputs = [parameter for _, parameter in owned if parameter is not None]
        gradients = [
            torch.autograd.grad(losses[name], inputs, retain_graph=True, allow_unused=True)
            for name in names
        ]
        shared = [i for i in range(len(trained)) if all(g[i] is not None for g in gradients)]
        if not shared:
            raise DistmonError("the tasks share no parameter that their losses depend on")
        offsets, scales = zip(*(self._sample(trained[i]) for i in shared), strict=True)
        elements = torch.stack(
            [
                torch.cat(
                    [
                        # First to the device of the offsets: that of a copied shard is the host.
                        gradient[i].detach().reshape(-1)[offset].to(offset.device).double() * scale
                        for i, offset, scale in zip(shared, offsets, scales, strict=True)
                    ]
                )
                for gradient in gradients
            ]
        )
        key = hash48(f"{names}{[trained[i].name for i in shared]}")
        self._waiting = Measured(key, names, elements)

    def _sample(self, shard: Shard) -> tuple[torch.Tensor, float]:
        sample = choose(shard.name, shard.numel, SAMPLE_SIZE, self._seed)
        offsets = torch.from_numpy(sample.indices).to(shard.weight().device)
        return offsets, math.sqrt(sample.expansion)

    @property
    def key(self) -> float:
        """Key of the waiting measurement, 0 without one."""
        return float(self._waiting.key) if self._waiting else 0.0

    def take(self) -> Measured | None:
        """Return the waiting measurement, which becomes part of this observation."""
        taken, self._waiting = self._waiting, None
        return taken

"""How strongly each task of a multi-task model pulls at the parameters that the tasks share.

The gradient of a task's loss is taken beside `.grad`, and a small sample of it is kept. The one of
the global batch is the mean over ranks, and the norm of a mean cannot be had from the ranks' own
norms: so the sampled elements are added up, and the norm is taken of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distmon.errors import DistmonError
from distmon.layout import Shard
from distmon.metrics import TASK_PREFIX
from distmon.reduce import Ranks
from distmon.sampling import choose, hash48

SAMPLE_SIZE = 256
"""Elements of each shared parameter: the norm over all of them needs fewer than each one's own."""
MOST_TASKS = 16


@dataclass(frozen=True)
class Measured:
    """The sampled gradients of all tasks on this rank."""

    key: int
    """48 bits; equal on ranks that measured the same tasks on the same parameters."""
    names: tuple[str, ...]
    elements: torch.Tensor
    """float64 [tasks, elements], each scaled so that its square stands for those not sampled."""


class TaskGradients:
    """Measures the tasks' gradients on the parameters that are whole on this rank."""

    def __init__(self, shards: Sequence[Shard], seed: int, ranks: Ranks) -> None:
        self._shards = shards
        self._seed = seed
        self._ranks = ranks
        self._waiting: Measured | None = None
        self._sent: Measured | None = None

    def measure(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of all losses; their graphs stay alive and `.grad` is not touched."""
        if not 2 <= len(losses) <= MOST_TASKS:
            raise DistmonError(f"task_losses takes 2 to {MOST_TASKS} losses, not {len(losses)}")
        trained = [s for s in self._shards if s.requires_grad() and s.parameters]
        if any(s.spread != "whole" for s in trained):
            raise DistmonError(
                "task_losses needs whole parameters on every rank: without a wrapper or with DDP"
            )
        names = tuple(sorted(losses))
        inputs = [s.parameters[0] for s in trained]
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
                        gradient[i].detach().reshape(-1)[offset].double() * scale
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

    def send(self) -> float:
        """What this rank's telemetry says of the tasks; they belong to this observation now."""
        self._sent, self._waiting = self._waiting, None
        return float(self._sent.key) if self._sent else 0.0

    def norms(self, keys: Sequence[float]) -> dict[str, float]:
        """Norm of each task's gradient over the global batch; empty when a rank has none.

        A collective when all ranks have measured the same, which every rank sees in `keys`.
        """
        mine, self._sent = self._sent, None
        if mine is None or set(keys) != {float(mine.key)}:
            return {}
        total = mine.elements
        self._ranks.all_reduce(total, dist.ReduceOp.SUM)
        norms = (total / self._ranks.size).square().sum(1).sqrt().cpu().tolist()
        return dict(zip(mine.names, norms, strict=True))


def task_ratios(norms: Mapping[str, float]) -> dict[str, float]:
    """Each task's norm over the mean of the others'; 1 is balance."""
    ratios = {}
    for name, norm in norms.items():
        others = [value for other, value in norms.items() if other != name]
        mean = sum(others) / len(others) if others else 0.0
        ratios[name] = norm / mean if mean > 0 else math.nan
    return ratios


def task_metrics(norms: Mapping[str, float]) -> dict[str, float]:
    """What is logged of the tasks: two tags for each."""
    tags = {f"{TASK_PREFIX}{name}/grad_norm": norm for name, norm in norms.items()}
    return tags | {f"{TASK_PREFIX}{name}/ratio": r for name, r in task_ratios(norms).items()}

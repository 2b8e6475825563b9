"""The optimizer, in two groups, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")
FINAL_SHARE = 0.1  # a cosine ends at this share of the peak


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    shapes: dict[str, torch.Size],
    lr: float,
    weight_decay: float,
    name: str = "adamw",
) -> torch.optim.Optimizer:
    """Matrices decay; norms do not, because shrinking them only fights the data.

    `shapes` are those of the whole parameters: the piece of a matrix need not be a matrix.
    """
    matrices = [each for name, each in parameters.items() if len(shapes[name]) >= 2]
    others = [each for name, each in parameters.items() if len(shapes[name]) < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(
    step: int, steps: int, warmup: int, peak: float, schedule: str = "cosine"
) -> float:
    """Linear warmup to `peak`, then it stays, or a cosine to a tenth of it. The first step is 1."""
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

"""AdamW in two groups and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

FINAL_SHARE = 0.1  # the learning rate ends at this share of its peak


def build_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Matrices decay; norms do not, because shrinking them only fights the data."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warmup to `peak`, then a cosine down to a tenth of it. The first step is 1."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

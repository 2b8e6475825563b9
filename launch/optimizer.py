"""The optimizer, in two parameter groups, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from launch.options import Options

FINAL_SHARE = 0.1  # a cosine schedule ends at this share of the peak


def build_optimizer(
    parameters: dict[str, nn.Parameter], shapes: dict[str, torch.Size], options: Options
) -> torch.optim.Optimizer:
    """Return an optimizer that decays matrices only.

    `shapes` are those of the whole parameters: the shard of a matrix may be a vector.
    """
    matrices = [each for name, each in parameters.items() if len(shapes[name]) >= 2]
    others = [each for name, each in parameters.items() if len(shapes[name]) < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))


def learning_rate(step: int, options: Options) -> float:
    """Return the rate of a step, counted from 1: linear warmup, then constant or a cosine."""
    warmup = options.warmup
    if step <= warmup:
        return options.lr * step / warmup
    if options.schedule == "constant":
        return options.lr
    done = (step - warmup) / max(1, options.steps - warmup)
    return options.lr * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))

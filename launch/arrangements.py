"""Chooses the arrangement of a division and imports what it needs, and nothing else.

FSDP and pipelining take a second or two to import, which plain DDP does not have to wait for.
"""

from __future__ import annotations

from arrangement import Arrangement, Conditions
from gpt import GPT


def arrange(model: GPT, conditions: Conditions) -> Arrangement:
    """Spread the model over the ranks. All ranks call it with the same weights."""
    mode = conditions.division.mode
    if mode == "ddp" and not conditions.ranks.grouped:
        return Arrangement(model, conditions)
    if mode == "ddp":
        from replicated import Replicated

        return Replicated(model, conditions)
    if mode == "fsdp1":
        from flat_sharded import FlatSharded

        return FlatSharded(model, conditions)
    if mode == "tp":
        from tensor_parallel import TensorParallel

        return TensorParallel(model, conditions)
    if mode == "pp":
        from pipeline import Pipeline

        return Pipeline(model, conditions)
    if mode == "deepspeed":
        from zero import Zero

        return Zero(model, conditions)
    from fully_sharded import FullySharded

    return FullySharded(model, conditions)

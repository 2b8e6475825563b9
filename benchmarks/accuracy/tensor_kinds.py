"""The kind of a parameter, from its name and shape: how gradients lie in it depends on that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

KINDS: Final = ("embedding", "head", "expert", "matrix", "conv", "vector")
EMBEDDINGS: Final = ("embed", "wte", "wpe", "shared", "users", "items", "attention_bias")
"""Parts of the names of lookup tables; T5 looks up its relative attention biases."""
HEADS: Final = ("lm_head", "head", "classifier", "decoder", "score")
"""Names of the module that maps to classes or words."""


def kind_of(name: str, shape: Sequence[int]) -> str:
    """Return one of KINDS."""
    if math.prod(shape) == max(shape, default=1):  # also a class token of shape (1, 1, width)
        return "vector"
    if "expert" in name:
        return "expert"
    if len(shape) > 3:
        return "conv"
    if any(part in name for part in EMBEDDINGS):
        return "embedding"
    return "head" if name.split(".")[-2:-1] and name.split(".")[-2] in HEADS else "matrix"

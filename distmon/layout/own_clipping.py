"""Wrappers that clip gradients by a method of their own, because each rank holds a part of them."""

from __future__ import annotations

import sys


def wrappers_that_clip() -> tuple[type, ...]:
    """Return the wrappers with a `clip_grad_norm_` of their own that this process has loaded."""
    module = sys.modules.get("torch.distributed.fsdp")
    return () if module is None else (module.FullyShardedDataParallel,)

"""Whether all ranks are about to attach: attaching is collective, and a script may be uneven."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist

PATIENCE_S: Final = 30.0
"""Longest wait for the other ranks; without all of them none attaches."""


def ranks_are_known(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process trains alone, or knows the other ranks by now."""
    if dist.is_available() and dist.is_initialized():
        return True
    return int(environ.get("WORLD_SIZE") or 1) == 1


def is_side_process() -> bool:
    """Return whether this is a child process that is not a rank, such as a worker that trains."""
    started_by_python = multiprocessing.parent_process() is not None
    return started_by_python and not (dist.is_available() and dist.is_initialized())


def all_ranks_meet(number: int, message: str, patience: float = PATIENCE_S) -> str | None:
    """Return the message of rank 0 when every rank is about to attach for the `number`-th time.

    Returns None, on every rank, when one of them does not come: one atomic `compare_set` in the
    job's own store decides, whichever rank gives up first.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return message
    whole = dist.distributed_c10d._get_default_store()
    store = dist.distributed_c10d.PrefixStore("distmon-run", whole)
    if dist.get_rank() == 0:
        store.set(f"message/{number}", message)
    return store.get(f"message/{number}").decode() if _decide(store, number, patience) else None


def _decide(store: Any, number: int, patience: float) -> bool:
    decision = f"decision/{number}"
    if store.add(f"present/{number}", 1) == dist.get_world_size():
        return bool(store.compare_set(decision, "", "yes") == b"yes")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if store.check([decision]):
            return bool(store.get(decision) == b"yes")
        time.sleep(0.002)
    return bool(store.compare_set(decision, "", "no") == b"yes")

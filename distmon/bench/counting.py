"""Count what a contender makes torch do: operations, host synchronizations, collectives, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING: Final = frozenset(
    ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "masked_select")
)
"""Operations that read a value back to Python, or need one to size their result."""


@dataclass(frozen=True)
class Counts:
    """Of everything that torch's dispatcher ran."""

    launches: int = 0
    """Operations that compute something; views do not."""
    host_syncs: int = 0
    collectives: int = 0
    sent_bytes: int = 0
    """In the tensors given to collectives."""

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.launches - other.launches,
            self.host_syncs - other.host_syncs,
            self.collectives - other.collectives,
            self.sent_bytes - other.sent_bytes,
        )


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.host_syncs = self.collectives = self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            if name not in ("wait_tensor", "barrier"):
                self.collectives += 1
                self.sent_bytes += sum(
                    each.nbytes for each in tree_leaves(args[0]) if isinstance(each, torch.Tensor)
                )
        elif name in WAITING:
            self.host_syncs += 1
        elif func.namespace == "aten" and not func.is_view:
            self.launches += 1
        return func(*args, **(kwargs or {}))


class Fetched(TorchFunctionMode):
    """Counts tensors that are copied to the host, which waits for them if they are elsewhere.

    On a CPU such a call does nothing, so it is no operation that the dispatcher would count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.cpu
        return func(*args, **(kwargs or {}))


def count(work: Callable[[], object]) -> Counts:
    """Return the counts of `work`."""
    with Dispatched() as seen, Fetched() as fetched:
        work()
    return Counts(seen.launches, seen.host_syncs + fetched.count, seen.collectives, seen.sent_bytes)

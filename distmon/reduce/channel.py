"""Collectives on a process group of the monitor's own, launched without waiting for other ranks.

Every rank launches the same collectives on a channel in the same order; that order is all that a
channel needs. What ranks launch at times of their own goes through another channel.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist

from distmon.errors import CollectiveError

Reduction = tuple[torch.Tensor, dist.ReduceOp.RedOpType]
"""A tensor that is reduced in place, and how."""
_POLL_SECONDS: Final = 0.0005


class Pending:
    """Collectives that were launched together."""

    def __init__(self, works: Sequence[Any] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        self._works = works
        self._tensors = tensors  # alive until the collectives are done

    def done(self) -> bool:
        """Return whether all of them have ended, also by an error. Never waits."""
        return all(work.is_completed() for work in self._works)

    def wait(self, seconds: float) -> bool:
        """Wait until they have ended, at most `seconds`; return whether they have."""
        deadline = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def join(self) -> None:
        """Wait until they have ended, or raise CollectiveError.

        On an accelerator only the current stream waits.
        """
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            raise CollectiveError(f"{type(error).__name__}: {error}") from error


class Channel:
    """One process group; without a group, a world of one rank."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, local: bool = True) -> None:
        """`local`: this rank may destroy the group alone, as is true of gloo and not of NCCL."""
        self._group = group
        self._local = local
        self._launched: deque[Pending] = deque()

    @property
    def name(self) -> str:
        """Name of the process group; the same on all ranks."""
        return str(getattr(self._group, "group_name", ""))

    def launch(self, *each: Reduction) -> Pending:
        """Start to reduce tensors in place. Raises CollectiveError when the group is broken."""
        if self._group is None:
            return Pending()
        try:
            works = [
                dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
                for tensor, op in each
            ]
        except Exception as error:
            raise CollectiveError(f"{type(error).__name__}: {error}") from error
        pending = Pending([work for work in works if work is not None], [t for t, _ in each])
        while self._launched and self._launched[0].done():
            self._launched.popleft()
        self._launched.append(pending)
        return pending

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place and wait for it; used at attach only."""
        self.launch((tensor, op)).join()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast the tensor of rank `source` in place and wait for it; used at attach only."""
        if self._group is not None:
            dist.broadcast(tensor, src=source, group=self._group)

    def close(self) -> None:
        """Leave the group. Enters no collective and waits for no rank.

        A gloo group is destroyed; its connections close, so a rank that still waits for this one
        learns of it at once. While a collective is running, destroying would wait for its timeout,
        and destroying an NCCL communicator waits for all ranks: then the group stays as it is until
        the process ends.
        """
        group, self._group = self._group, None
        launched, self._launched = self._launched, deque()  # works keep their connections open
        if group is None:
            return
        if not self._local or not all(pending.done() for pending in launched):
            _keep_forever(group)
        elif dist.is_initialized():
            # The default group may have been destroyed and created anew since.
            with suppress(Exception):
                dist.destroy_process_group(group)


def _keep_forever(group: object) -> None:
    """Never run the destructor, not even when the interpreter ends: it waits for the threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

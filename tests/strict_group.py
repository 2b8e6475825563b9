"""A process group that behaves as NCCL does where gloo is forgiving; its data goes through gloo.

`shutdown` waits for all ranks; a collective that takes longer than the timeout ends the process;
ranks that launch different collectives, or in a different order, end it too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

EXIT_CODE = 97


def _end(why: str) -> None:
    print(f"strict process group: {why}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class StrictGroup(dist.ProcessGroup):
    """Forwards every collective to gloo, under the rules above."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = dist.PrefixStore("strict", store)
        self._number, self._size, self._rank = 0, size, rank
        self._timeout = timeout.total_seconds()
        self._inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
        self._works: list[tuple[float, str, Any]] = []
        threading.Thread(target=self._watch, name="strict-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(0.2)
            self._works = [each for each in self._works if not each[2].is_completed()]
            for began, what, _ in self._works:
                if time.monotonic() - began > self._timeout:
                    _end(f"{what} took longer than {self._timeout:g} s")

    def _check(self, what: str) -> None:
        """Compare the collective with that of rank 0, which all launch in one order."""
        self._number += 1
        key = str(self._number)
        if self._rank == 0:
            self._store.set(key, what)
        elif (first := self._store.get(key).decode()) != what:
            _end(f"collective {key} is {what} on rank {self._rank} and {first} on rank 0")

    def _forward(self, name: str, tensors: Any, *args: Any) -> Any:
        flat = tensors
        while isinstance(flat, list) and flat and isinstance(flat[0], list):
            flat = flat[0]
        shapes = [tuple(t.shape) for t in flat] if isinstance(flat, list) else tuple(flat.shape)
        what = f"{name}{shapes}"
        self._check(what)
        work = getattr(self._inner, name)(tensors, *args)
        self._works.append((time.monotonic(), what, work))
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._forward("allreduce", tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._forward("broadcast", tensors, opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._forward("allgather", outputs, inputs, opts or dist.AllgatherOptions())

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        return self._forward("_allgather_base", output, given, opts or dist.AllgatherOptions())

    def barrier(self, opts: Any = None) -> Any:
        self._check("barrier")
        return self._inner.barrier(opts or dist.BarrierOptions())

    def getBackendName(self) -> str:
        return "strict"

    def shutdown(self) -> None:
        """Wait for all ranks, as destroying a communicator does."""
        self._store.add("leaving", 1)
        deadline = time.monotonic() + self._timeout
        while self._store.add("leaving", 0) < self._size:
            if time.monotonic() > deadline:
                _end(f"rank {self._rank} destroyed its communicator alone")
            time.sleep(0.01)


def register() -> None:
    """Make the backend `strict` known to torch.distributed, in this process."""
    if "strict" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "strict",
            lambda store, rank, size, timeout: StrictGroup(store, rank, size, timeout),
            devices=["cpu"],
        )

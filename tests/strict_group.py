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

import torch
import torch.distributed as dist

EXIT_CODE = 97
_c10d: Any = dist.distributed_c10d


def _end(why: str) -> None:
    print(f"strict process group: {why}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class StrictGroup(dist.ProcessGroup):
    """Forwards every collective to gloo, under the rules above."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = dist.PrefixStore("strict", store)
        self._number, self._size, self._rank = 0, size, rank
        self._name = ""
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

    def _forward(self, name: str, *args: Any) -> Any:
        shapes = [tuple(t.shape) for t in _tensors(args[0])]
        what = f"{name}{shapes}"
        self._check(what)
        work = getattr(self._inner, name)(*args)
        self._works.append((time.monotonic(), what, work))
        return work

    def all_to_all_single(
        self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Any:
        options = opts or _c10d.AllToAllOptions()
        return self._forward("alltoall_base", output, given, out_sizes, in_sizes, options)

    alltoall_base = all_to_all_single  # names before torch 2.13: here, and below

    def _one_by_one(self, name: str, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Launch several at once, which gloo cannot; the last one stands for all."""
        works = [self._forward(name, *pair, opts) for pair in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._one_by_one(
            "_allgather_base", outputs, inputs, opts or _c10d.AllgatherOptions()
        )

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._one_by_one(
            "_reduce_scatter_base", outputs, inputs, opts or _c10d.ReduceScatterOptions()
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._inner.send(tensors, rank, tag)  # between two ranks: no order over all

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._inner.recv(tensors, rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        self._check("barrier")
        return self._inner.barrier(opts or dist.BarrierOptions())

    def getBackendName(self) -> str:
        return "strict"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Wait for all ranks, as destroying a communicator does."""
        self._store.add("leaving", 1)
        deadline = time.monotonic() + self._timeout
        while self._store.add("leaving", 0) < self._size:
            if time.monotonic() > deadline:
                _end(f"rank {self._rank} destroyed its communicator alone")
            time.sleep(0.01)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)]


def _forwarded(name: str, options: type) -> Any:
    """A collective of the group: all are checked and forwarded alike."""

    def collective(self: StrictGroup, *args: Any) -> Any:
        given = args if args and not isinstance(args[-1], (torch.Tensor, list)) else (*args, None)
        return self._forward(name, *given[:-1], given[-1] or options())

    return collective


for _name, _options in {
    "allreduce": _c10d.AllreduceOptions,
    "allreduce_coalesced": _c10d.AllreduceCoalescedOptions,
    "broadcast": _c10d.BroadcastOptions,
    "reduce": _c10d.ReduceOptions,
    "allgather": _c10d.AllgatherOptions,
    "_allgather_base": _c10d.AllgatherOptions,
    "reduce_scatter": _c10d.ReduceScatterOptions,
    "_reduce_scatter_base": _c10d.ReduceScatterOptions,
    "gather": _c10d.GatherOptions,
    "scatter": _c10d.ScatterOptions,
    "alltoall": _c10d.AllToAllOptions,
}.items():
    setattr(StrictGroup, _name, _forwarded(_name, _options))
# Since torch 2.13 a group has other names for what a backend has under these.
for _name, _backend_name in (
    ("all_gather_single", "_allgather_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
):
    setattr(StrictGroup, _name, getattr(StrictGroup, _backend_name))


def register() -> None:
    """Make the backend `strict` known to torch.distributed, in this process."""
    if "strict" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "strict",
            lambda store, rank, size, timeout: StrictGroup(store, rank, size, timeout),
            devices=["cpu"],
        )

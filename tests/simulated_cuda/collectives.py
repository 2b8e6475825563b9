"""Collectives of the simulated device: stream-ordered as NCCL's, over gloo.

A collective is a job on a stream of its process group. It runs when that stream gets there, on a
thread that stands for the device, so the host never waits. Like NCCL, `shutdown` returns when all
ranks have called it, and a collective that fails ends the process.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from simulated_cuda import device

NAME = "simulated_nccl"
WATCHDOG_EXIT = 134
"""Exit code of a process that the watchdog has ended."""

Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Let `init_process_group("cpu:gloo,cuda:simulated_nccl")` find the backend."""
    dist.Backend.register_backend(NAME, DeviceGroup, devices=["cuda"])


class DeviceGroup(dist.ProcessGroup):
    """A communicator with a stream of its own for each device that it is used on."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)
        # Tensors on the host are reduced at once, in an order of their own.
        self._on_host = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._name = "default"
        self._streams: dict[int, torch.Stream] = {}
        self._queued: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._progress, daemon=True, name=NAME).start()

    def _progress(self) -> None:
        """Run the streams of this group, as the device does."""
        while (where := self._queued.get()) is not None:
            device.extension.run_stream(*where)

    def _launch(self, name: str, tensors: Tensors, result: Any, run: Callable[[Any], None]) -> Any:
        """Queue `run` behind the current stream; returns work that streams wait for."""
        if tensors[0].is_cpu:
            run(self._on_host)
            done: Any = Future()
            done.set_result(result)
            return _create_work_from_future(done)
        index = tensors[0].device.index
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = torch.Stream(torch.device("cuda", index))
        stream.wait_stream(torch.accelerator.current_stream(index))
        for tensor in tensors:
            tensor.record_stream(stream)
        future: Any = Future(devices=[torch.device("cuda", index)])
        with stream:
            device.extension.launch(lambda: self._guarded(name, run), name, meets_ranks=True)
            future.set_result(result)
        self._queued.put((index, stream.stream_id))
        return _create_work_from_future(future)

    def _guarded(self, name: str, run: Callable[[Any], None]) -> None:
        try:
            run(self._gloo)
        except Exception as error:
            print(f"watchdog: {name} failed on rank {self.rank()}: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(WATCHDOG_EXIT)

    # What torch calls, by its names.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._launch(
            "all_reduce",
            tensors,
            tensors,
            lambda gloo: gloo.allreduce(_host(tensors), opts).wait(),
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        def run(gloo: Any) -> None:
            for host in _host(tensors):
                each = dist.AllreduceOptions()
                each.reduceOp = opts.reduceOp
                gloo.allreduce([host], each).wait()

        return self._launch("all_reduce_coalesced", tensors, tensors, run)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._launch(
            "broadcast",
            tensors,
            tensors,
            lambda gloo: gloo.broadcast(_host(tensors), opts).wait(),
        )

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:  # noqa: ARG002
        tensors = [*outputs[0], *inputs]
        return self._launch(
            "all_gather",
            tensors,
            outputs,
            lambda gloo: gloo.allgather([_host(outputs[0])], _host(inputs)).wait(),
        )

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:  # noqa: ARG002
        def run(gloo: Any) -> None:
            parts = [*_host([out])[0].view(self.size(), -1)]
            gloo.allgather([parts], [_host([mine])[0].reshape(-1)]).wait()

        return self._launch("all_gather_single", [out, mine], out, run)

    def _reduce_scatter_base(self, out: torch.Tensor, mine: torch.Tensor, opts: Any) -> Any:
        def run(gloo: Any) -> None:
            summed, average = _host([mine])[0].clone(), opts.reduceOp == dist.ReduceOp.AVG
            each = dist.AllreduceOptions()
            each.reduceOp = dist.ReduceOp.SUM if average else opts.reduceOp
            gloo.allreduce([summed], each).wait()
            part = summed.reshape(self.size(), -1)[self.rank()]
            _host([out])[0].copy_((part / self.size() if average else part).view(out.shape))

        return self._launch("reduce_scatter_single", [out, mine], out, run)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Any:
        given = inputs[0] if inputs else []
        return self._launch(
            "scatter",
            [*outputs, *given],
            outputs,
            lambda gloo: gloo.scatter(_host(outputs), [_host(given)] if given else [], opts).wait(),
        )

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002
        mark = torch.zeros(1, device="cuda")
        work = self.allreduce([mark], dist.AllreduceOptions())
        work.wait()
        mark.cpu()  # NCCL's barrier waits on the host
        return work

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def shutdown(self) -> None:
        """Return when all ranks have called this."""
        self._gloo.barrier().wait()
        self._queued.put(None)

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def supports_splitting(self) -> bool:
        return False


def _host(tensors: Tensors) -> list[torch.Tensor]:
    """Return the bytes of device tensors, for a job that runs in their stream's order."""
    plain = [tensor.detach() for tensor in tensors]
    return [each if each.is_cpu else device.extension.bytes_of(each) for each in plain]

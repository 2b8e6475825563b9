"""This process among the others: rank, device, process group, and how they stop together."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

# DDP imports it, and what it finds as the process group then becomes a default argument that lives
# for ever. Imported before there is a group, it finds none, and `leave` really ends the group.
import torch.distributed.nn
from bad_input import BadInput

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. Without torchrun it is alone and there is no process group."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def grouped(self) -> bool:
        """Whether there is a process group. torchrun with one process has one too."""
        return dist.is_initialized()

    def device(self, wanted: str) -> torch.device:
        """The device for `--device`: `auto` takes CUDA when every local rank can have a GPU."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if wanted == "cuda" and gpus < self.local_world:
            raise BadInput(f"--device cuda needs {self.local_world} GPUs here and found {gpus}")
        if wanted == "cpu" or gpus < self.local_world:
            return torch.device("cpu")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank. When it finds bad input on any, all ranks leave with code 2.

        Rank 0 speaks before anybody leaves, because torchrun ends all ranks as soon as one does.
        """
        result: T | None = None
        problem: str | None = None
        try:
            result = work()
        except BadInput as found:
            problem = str(found)
        problems: list[str | None] = [problem]
        if self.grouped:
            problems = [None] * self.world
            dist.all_gather_object(problems, problem)
        sentences = [text for text in problems if text is not None]
        if sentences:
            self.complain(sentences[0])
            self.wait()
            raise SystemExit(2)
        return result  # type: ignore[return-value]  # no problem means that `work` returned

    def wait(self) -> None:
        """Until every rank is here. torchrun ends all ranks when one leaves with a code."""
        if self.grouped:
            dist.barrier()

    def complain(self, sentence: str) -> None:
        """Say on stderr, once for all ranks, what is wrong."""
        if self.is_main:
            print(f"train.py: {sentence}", file=sys.stderr, flush=True)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over ranks. Every rank must call it."""
        values = values.clone()
        if self.grouped:
            dist.all_reduce(values)
        return values

    def mean(self, value: torch.Tensor) -> float:
        """The mean of a scalar over ranks. Every rank must call it."""
        return float(self.total(value.detach()) / self.world)

    def share(self, count: int) -> int:
        """This rank's share of a number of things; the shares of all ranks add up to it."""
        return count * (self.rank + 1) // self.world - count * self.rank // self.world

    def leave(self) -> None:
        """End the process group and its threads; to be called when no model refers to it any more.

        A gloo thread still alive while Python shuts down can abort a process that is done.
        """
        if self.grouped:
            # torchrun ends all ranks when one has left with a code. This one is leaving already,
            # with a code of its own, which its report is to show.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            gc.collect()  # a model wrapped in DDP is part of a reference cycle
            dist.destroy_process_group()


def join_ranks() -> Ranks:
    """Join the process group when torchrun, or whatever sets its variables, started us."""
    environ = os.environ
    ranks = Ranks(
        rank=int(environ.get("RANK", 0)),
        world=int(environ.get("WORLD_SIZE", 1)),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        local_world=int(environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    if "RANK" in environ and "MASTER_ADDR" in environ:
        # Both kinds of tensor are reduced, so that --device cpu also works on a machine with GPUs.
        both = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo")
    if ranks.local_world > 1 and "OMP_NUM_THREADS" not in environ:
        # Every rank would otherwise start one thread per core and the ranks fight for the cores.
        torch.set_num_threads(max(1, available_cores() // ranks.local_world))
    return ranks


def available_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

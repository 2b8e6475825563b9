"""This process among the other ranks: process group, device, and how all ranks stop together."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# DDP imports it, and it keeps the process group of that moment as a default argument. Imported
# before there is one, it keeps none, and `leave` really ends the group.
import torch.distributed.nn
from torch.distributed.tensor import DTensor

CHECK_EVERY = 5  # steps between two exchanges of "was there a Ctrl-C?"


class BadInput(Exception):
    """What the user can correct, as one sentence. Printed on rank 0; the exit code is 2."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process. Without torchrun there is one rank and no process group."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def has_group(self) -> bool:
        """Whether there is a process group; torchrun with one process makes one too."""
        return dist.is_initialized()

    def device(self, wanted: str) -> torch.device:
        """Return the device for `--device`; `auto` is CUDA when every local rank has a GPU."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if wanted == "cuda" and gpus < self.local_world:
            raise BadInput(f"--device cuda needs {self.local_world} GPUs here and found {gpus}")
        if wanted == "cpu" or gpus < self.local_world:
            return torch.device("cpu")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def stop_together(self) -> Iterator[None]:
        """Exit with code 2 on all ranks when the block raises `BadInput` on any of them.

        Rank 0 prints before any rank exits, because torchrun ends all ranks when the first does.
        """
        problem = None
        try:
            yield
        except BadInput as error:
            problem = error
        problems = [each for each in self.gather(problem) if each is not None]
        if problems:
            self.complain(problems[0])
            self.gather(None)
            raise SystemExit(2)

    def complain(self, problem: BadInput) -> None:
        """Print what is wrong to stderr, once for all ranks."""
        if self.is_main:
            print(f"train.py: {problem}", file=sys.stderr, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank, once all have come here."""
        if not self.has_group:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over ranks."""
        values = values.detach().clone()
        if self.has_group:
            dist.all_reduce(values)
        return values

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean of a scalar over ranks."""
        return float(self.sum(value) / self.world)

    def share(self, count: int) -> int:
        """Return this rank's share of `count`; the shares of all ranks add up to it."""
        return count * (self.rank + 1) // self.world - count * self.rank // self.world

    def leave(self) -> None:
        """Destroy the process group, once nothing refers to it.

        A gloo thread that is alive while Python shuts down can abort a process that is done.
        """
        if self.has_group:
            # torchrun sends SIGTERM to all ranks when the first has exited with a code. This rank
            # is about to exit with its own code, which torchrun's report should show.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            gc.collect()  # a model wrapped in DDP is part of a reference cycle
            dist.destroy_process_group()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds of a parameter or gradient, for in-place use."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def join_ranks() -> Ranks:
    """Join the process group if torchrun, or whatever sets its variables, started this process."""
    environ = os.environ
    ranks = Ranks(
        rank=int(environ.get("RANK", 0)),
        world=int(environ.get("WORLD_SIZE", 1)),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        local_world=int(environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    if "RANK" in environ and "MASTER_ADDR" in environ:
        # Both backends, so that --device cpu also works on a machine with GPUs.
        both = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo")
    return ranks


@contextmanager
def interruptible(ranks: Ranks) -> Iterator[Callable[[int], bool]]:
    """Let SIGINT and SIGTERM end training after a step instead of killing the process.

    Yields what to ask after each step, on all ranks: whether to stop, with the same answer on all.
    In a single process a second signal kills. Under torchrun it does not, because torchrun repeats
    the Ctrl-C that the terminal has already sent to every rank, and kills slow ranks itself.
    """
    signaled = False

    def note(*_: object) -> None:
        nonlocal signaled
        signaled = True
        if not ranks.has_group:
            restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def requested(step: int) -> bool:
        if not ranks.has_group:
            return signaled
        return step % CHECK_EVERY == 0 and bool(ranks.sum(torch.tensor(int(signaled))))

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        restore()

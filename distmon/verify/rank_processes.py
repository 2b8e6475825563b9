"""Gloo processes on this machine that train one parallelism after the other."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from distmon.sampling.reading import SampleSize
from distmon.verify.observe import Observed, observe
from distmon.verify.parallelisms import PARALLELISMS, UnsupportedModelError

GROUP_TIMEOUT_S = 60
"""Timeout of the process group's collectives."""
_LONGEST_S = 600.0
_GRACE_S = 10.0
"""Time that the other ranks get to finish after one rank has failed."""


@dataclass(frozen=True)
class Job:
    """What to train; equal for all parallelisms of one `distmon verify`."""

    source: str | None
    steps: int
    interval: int
    sample_size: SampleSize = "sampled"


@dataclass(frozen=True)
class Skipped:
    """The parallelism does not support the model."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A rank raised, died or timed out."""

    message: str
    when: float
    """Unix time; the earliest failure is reported, since the others usually follow from it."""


Outcome = Observed | Skipped | Failed


class RankProcesses:
    """Processes, one per rank, that wait for the name of a parallelism to train.

    After a failure the ranks may be inside different collectives: `broken` is then set, and the
    caller starts new processes.
    """

    def __init__(self, ranks: int, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distmon-verify-")
        self.broken = False
        # The fork server imports torch once, and ranks are forked from it before any thread starts:
        # new processes take no time, where spawning takes seconds of every core.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, ranks, job, self._folder.name, theirs, GROUP_TIMEOUT_S),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, name: str) -> list[Outcome]:
        """Train a parallelism on all ranks and return the outcomes by rank."""
        self.broken = True  # until all ranks have replied
        for pipe in self._pipes:
            pipe.send(name)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + _LONGEST_S
        some_failed = False
        while len(outcomes) < len(self._pipes):
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in outcomes}
            ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                timed_out = Failed("did not finish in time", time.time())
                outcomes |= dict.fromkeys(waiting.values(), timed_out)
            for rank in (rank for pipe, rank in waiting.items() if pipe in ready):
                outcomes[rank] = self._receive(rank)
                if isinstance(outcomes[rank], Failed) and not some_failed:
                    some_failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        self.broken = any(isinstance(o, Failed) for o in outcomes.values())
        return [outcomes[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = self._pipes[rank].recv()
        except EOFError:
            process = self._processes[rank]
            process.join(_GRACE_S)
            log = (Path(self._folder.name) / f"rank{rank}.log").read_text(errors="replace")
            last = "\n".join(log.splitlines()[-5:])
            return Failed(f"died with exit code {process.exitcode}\n{last}", time.time())
        return outcome

    def close(self) -> None:
        """End the processes and wait until they are gone."""
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for its next parallelism then ends
        for process in self._processes:
            process.join(0 if self.broken else _GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def first_failure(outcomes: Sequence[Outcome]) -> str:
    """Return the message of the rank that failed first; empty when none did."""
    failed = [(o.when, rank, o) for rank, o in enumerate(outcomes) if isinstance(o, Failed)]
    if not failed:
        return ""
    _, rank, failure = min(failed)
    return f"rank {rank}: {failure.message}"


def _serve(
    rank: int, ranks: int, job: Job, folder: str, pipe: Connection, timeout_s: float
) -> None:
    """Run one rank: train one parallelism after the other, until the pipe is closed."""
    # Output of libraries would break the progress bar; its end is printed when the process dies.
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            name = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            break
        outcome = attempt(name, job, Path(folder))
        pipe.send(outcome)
        if isinstance(outcome, Failed):
            # No shutdown: the other ranks see the connection close and fail as well.
            sys.stdout.flush()
            os._exit(1)
    dist.destroy_process_group()


def attempt(name: str, job: Job, folder: Path) -> Outcome:
    """Train a parallelism in this process; return `Failed` instead of raising."""
    try:
        found = observe(
            PARALLELISMS[name], job.source, job.steps, job.interval, folder, job.sample_size
        )
        if dist.is_initialized():
            dist.barrier()
        return found
    except UnsupportedModelError as error:
        return Skipped(str(error))
    except Exception as error:
        traceback.print_exc()
        return Failed(f"{type(error).__name__}: {error}", time.time())

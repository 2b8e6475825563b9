"""A set of gloo processes on this machine that train one arrangement after the other."""

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

from distmon.layout.arrangements import ARRANGEMENTS, CannotArrangeError
from distmon.verify.observe import Observed, observe

GROUP_TIMEOUT_S = 60
"""A rank that waits longer for another one in a collective gives up."""
_LONGEST_S = 600.0
_GRACE_S = 10.0
"""Once one rank has failed, the others notice by themselves within this time or not at all."""


@dataclass(frozen=True)
class Job:
    """What to train; the same for all arrangements of one `distmon verify`."""

    source: str | None
    steps: int
    interval: int


@dataclass(frozen=True)
class Skipped:
    """The model does not fit the arrangement."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A rank raised, died or hung."""

    message: str
    when: float
    """Unix time: the first failure is the cause, the others follow from it."""


Outcome = Observed | Skipped | Failed


class RankSet:
    """Processes that wait for the name of an arrangement.

    After a failure the ranks may be anywhere in their collectives: the set is then broken, and the
    caller makes a new one.
    """

    def __init__(self, ranks: int, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distmon-verify-")
        self.broken = False
        # One process imports torch, and ranks are forked from it before any thread is started: a
        # new set takes no time, where spawning takes seconds of every core.
        spawning = multiprocessing.get_context("forkserver")
        spawning.set_forkserver_preload([__name__])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            mine, theirs = spawning.Pipe()
            process = spawning.Process(
                target=_serve, args=(rank, ranks, job, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, name: str) -> list[Outcome]:
        """Train an arrangement on all ranks; the outcomes by rank."""
        self.broken = True  # until all have answered
        for pipe in self._pipes:
            pipe.send(name)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + _LONGEST_S
        some_failed = False
        while len(outcomes) < len(self._pipes):
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in outcomes}
            ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = Failed("did not finish in time", time.time())
                outcomes |= dict.fromkeys(waiting.values(), late)
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
            pipe.close()  # a rank that waits for its next arrangement ends by itself
        for process in self._processes:
            process.join(0 if self.broken else _GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def first_failure(outcomes: Sequence[Outcome]) -> str:
    """The message of the rank that failed first; empty when none did."""
    failed = [(o.when, rank, o) for rank, o in enumerate(outcomes) if isinstance(o, Failed)]
    if not failed:
        return ""
    _, rank, failure = min(failed)
    return f"rank {rank}: {failure.message}"


def _serve(rank: int, ranks: int, job: Job, folder: str, pipe: Connection) -> None:
    """What a process does: one arrangement after the other, until the pipe is closed."""
    # What libraries print would tear the progress bar; it is shown when the process dies.
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            name = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            break
        outcome = attempt(name, job, Path(folder))
        pipe.send(outcome)
        if isinstance(outcome, Failed):
            # Without a farewell: the other ranks see the connection break and give up as well.
            sys.stdout.flush()
            os._exit(1)
    dist.destroy_process_group()


def attempt(name: str, job: Job, folder: Path) -> Outcome:
    """Train an arrangement in this process; what goes wrong is an outcome as well."""
    try:
        found = observe(ARRANGEMENTS[name], job.source, job.steps, job.interval, folder)
        if dist.is_initialized():
            dist.barrier()
        return found
    except CannotArrangeError as error:
        return Skipped(str(error))
    except Exception as error:
        traceback.print_exc()
        return Failed(f"{type(error).__name__}: {error}", time.time())

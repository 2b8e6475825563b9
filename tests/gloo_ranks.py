"""Run a function on several gloo ranks: real processes, a file store, no ports."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import strict_group
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked_python import fork_server

from distmon.record.builder import DIFFERENT

TIMEOUT_S = 60


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    strict: bool | None = None,
    writer: str = "process",
) -> list[Any]:
    """`function(rank, world, *args)` on every rank; the results by rank.

    `strict`: on a process group that behaves as NCCL does, which the monitor uses too. Without it
    the environment variable STRICT_RANKS decides: `STRICT_RANKS=1 pytest` runs all tests on it
    but those that are about the host transport, or that it cannot show (`strict=False`).

    `writer`: the default of the monitors in it. Where many are attached one after the other, a
    process for each would take longer than what is tested: "thread".

    `function` must be importable. A rank that raises fails the test with its traceback. Every
    monitor in it checks that all ranks derive the same records; one that differs fails the test.
    """
    if strict is None:
        strict = os.environ.get("STRICT_RANKS") == "1"
    fork_server()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _enter,
            (function, world, folder, args, strict, writer),
            nprocs=world,
            join=False,
            start_method="forkserver",
        )
        while not context.join(timeout=TIMEOUT_S):
            pass
        results = [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world)]
    failed = [f"rank {rank} failed:\n{v}" for rank, (ok, v) in enumerate(results) if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _enter(
    rank: int,
    function: Callable[..., Any],
    world: int,
    folder: str,
    args: tuple[Any, ...],
    strict: bool,
    writer: str,
) -> None:
    gc.freeze()  # see `forked_python`
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ["DISTMON_CHECK_RECORDS"] = "true"
    os.environ.pop("DISTMON_WRITER", None)
    if writer != "process":  # the environment would win over the config of a test
        os.environ["DISTMON_WRITER"] = writer
    different: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda entry: (  # type: ignore[method-assign]
        different.append(entry.getMessage()) if DIFFERENT in entry.getMessage() else None
    )
    logging.getLogger("distmon").addHandler(handler)
    store = dist.FileStore(f"{folder}/store", world)
    if strict:
        strict_group.register()
        os.environ["DISTMON_TRANSPORT"] = "device"
    dist.init_process_group(
        "strict" if strict else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        outcome = (True, function(rank, world, *args))
        assert not different, different
    except Exception:
        outcome = (False, traceback.format_exc())
    (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(outcome))
    if outcome[0]:
        dist.barrier()
    dist.destroy_process_group()

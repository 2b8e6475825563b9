"""Ranks that lose each other are named, no rank hangs, and nothing on disk is lost."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model

import distmon


def _forgetful(rank: int, _: int, folder: str) -> dict[str, Any]:
    """Rank 1 does not report one of its steps."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distmon").addHandler(handler)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    done = 0
    with distmon.attach(model, optimizer, **quiet(Path(folder), interval=4, timeout_s=3)) as m:
        for step in range(1, 7):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if not (rank == 1 and step == 2):
                m.step()
            done = step
    return {"done": done, "messages": messages}


def test_a_rank_that_falls_behind_is_named_by_all(tmp_path: Path) -> None:
    results = run_ranks(_forgetful, 3, str(tmp_path))
    assert [found["done"] for found in results] == [6, 6, 6]
    for rank, found in enumerate(results):
        (message,) = [text for text in found["messages"] if "collectives failed" in text]
        if rank == 1:
            assert "s after the others timed out" in message
        else:
            assert "rank 0, 2 at step 4; rank 1 did not respond" in message


KILLED = """
    import os, pathlib, signal, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import distmon

    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(
        wrapped, optimizer, run_dir=sys.argv[1], sinks=["jsonl", "arrow"], interval=2, timeout_s=20
    )
    pathlib.Path(sys.argv[1] + f".pid{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        inner = monitor.cycle.observer.buffers.start
        def die_at_the_third(calls=[]):
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            inner()
        monitor.cycle.observer.buffers.start = die_at_the_third
    for step in range(100):
        optimizer.zero_grad()
        wrapped(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        monitor.step(loss=1.0)
    monitor.close()
"""


def test_a_rank_killed_in_an_observation_leaves_a_readable_run(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    begin = time.monotonic()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *command, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode != 0
    assert "SIGKILL" in ended.stderr
    assert time.monotonic() - begin < 80
    pids = [int(path.read_text()) for path in tmp_path.glob("run.pid*")]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    run = distmon.read_run(tmp_path / "run")
    # The second was on its way to the disk when the end came.
    assert [record["step"] for record in run.records] in ([2], [2, 4])

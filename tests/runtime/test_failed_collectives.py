"""Ranks that lose each other are named, no rank hangs, and nothing on disk is lost."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model

import distmon


def _messages() -> list[str]:
    """Everything that is logged from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distmon").addHandler(handler)
    return messages


def _uneven(rank: int, _: int, folder: str) -> dict[str, Any]:
    """Rank 1 reports one step less in the first run, and ends before the others in the second."""
    messages, found = _messages(), {}
    for what in ("forgets", "leaves"):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        steps = 3 if (rank, what) == (1, "leaves") else 6
        monitor = distmon.attach(model, optimizer, **quiet(Path(folder) / what, interval=4))
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            if (rank, step, what) != (1, 2, "forgets"):
                monitor.step()
        monitor.close()
        for thread in threading.enumerate():
            if thread.name == "distmon-progress":
                thread.join()
        found[what], messages[:] = [*messages], []
    return found


def test_a_rank_with_fewer_steps_holds_nobody_and_what_is_missing_is_named(tmp_path: Path) -> None:
    # With `transport: device` a rank that observes waits for all others, as NCCL does.
    results = run_ranks(_uneven, 3, str(tmp_path), strict=False)
    assert [found["forgets"] for found in results] == [[], [], []]
    records = distmon.read_run(tmp_path / "forgets/run").records
    assert [record["step"] for record in records] == [4]
    assert results[1]["leaves"] == []
    for found in (results[0], results[2]):
        first, second = found["leaves"]
        assert "collectives failed" in first
        assert "training continues without the monitor" in first
        assert "rank 1 at step 3" in second  # the others have come to step 4, 5 or 6
    last = distmon.read_run(tmp_path / "leaves/run").records[0]
    assert last["partial"]
    assert last["step"] >= 4
    assert last["faults"][0].startswith("step 4 was not observed: ")


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
        inner = monitor.cycle.observer.start
        def die_at_the_third(*args, calls=[]):
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            inner(*args)
        monitor.cycle.observer.start = die_at_the_third
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
    # The writer process outlives the training by the seconds that it needs. The second observation
    # was on its way to it when the end came.
    while not (observed := _observed_steps(tmp_path / "run")) and time.monotonic() - begin < 80:
        time.sleep(0.2)
    assert observed in ([2], [2, 4])


def _observed_steps(path: Path) -> list[int]:
    records = distmon.read_run(path).records
    return [record["step"] for record in records if not record["partial"]]

"""Ranks that train fewer steps than the others, or leave early; and what other ranks than 0 do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model, train
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import distmon
from distmon.record.builder import RecordBuilder

GENEROUS_S = 30.0
"""Above every limit of the monitor together, and far below the timeout of a collective."""


def _leave_early(rank: int, folder: Path) -> float:
    """Rank 1 closes its monitor after 5 steps; the longest step."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(folder, interval=2))
    train(model, optimizer, monitor, range(1, 6))
    dist.barrier()
    if rank == 1:
        monitor.close()
    longest = 0.0
    for step in range(6, 14):
        begin = time.monotonic()
        train(model, optimizer, monitor, range(step, step + 1))
        longest = max(longest, time.monotonic() - begin)
    monitor.close()
    return longest


def _join(rank: int, folder: Path) -> float:
    """Rank 1 has data for 5 steps, rank 0 for 9; the longest step."""
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    longest = 0.0
    with distmon.attach(model, optimizer, **quiet(folder, interval=2)) as monitor:
        with Join([model]):
            for step in range(1, 6 if rank else 10):
                begin = time.monotonic()
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)
                longest = max(longest, time.monotonic() - begin)
        dist.barrier()
    return longest


def _derived(rank: int, folder: Path) -> int:
    """How many records this rank derives in 6 observations."""
    os.environ["DISTMON_CHECK_RECORDS"] = "false"
    calls, derive = [], RecordBuilder.derive
    RecordBuilder.derive = lambda *args: calls.append(rank) or derive(*args)  # type: ignore[method-assign,func-returns-value]
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(folder)) as monitor:
        for _ in range(6):
            optimizer.step()
            monitor.step(loss=1.0)
        monitor.cycle.settle(5.0)
        dist.barrier()
    return len(calls)


def _uneven(rank: int, _: int, folder: str) -> dict[str, Any]:
    return {
        "left": _leave_early(rank, Path(folder) / "left"),
        "joined": _join(rank, Path(folder) / "joined"),
        "derived": _derived(rank, Path(folder) / "derived"),
    }


def test_the_others_go_on_and_the_record_names_who_is_missing(tmp_path: Path) -> None:
    first, second = run_ranks(_uneven, 2, str(tmp_path), strict=False)
    assert max(first["left"], first["joined"], second["left"], second["joined"]) < GENEROUS_S
    # Rank 1 keeps the reduced numbers, and derives nothing that nobody asks for.
    assert second["derived"] == 0
    left = distmon.read_run(tmp_path / "left/run").records
    assert [record["step"] for record in left if record["applied"]] == [2, 4]
    said = " ".join(left[-1]["faults"])
    assert "step 6 was not observed" in said
    assert "rank 1 at step 5" in said
    joined = distmon.read_run(tmp_path / "joined/run").records
    assert [record["step"] for record in joined if record["applied"]] == [2, 4]
    said = " ".join(joined[-1]["faults"])
    assert "step 6 was not observed" in said
    assert "step 8 was not observed" in said
    assert "rank 1 at step 5" in said

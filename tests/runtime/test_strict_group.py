"""`transport: device` on a process group that is as strict as NCCL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import quiet, small_model, train
from test_actions import _train_until_stopped
from test_budget import _observe_expensively

import distmon


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    results = run_ranks(_train_until_stopped, 4, str(tmp_path), strict=True)
    assert [(found["at"], found["code"]) for found in results] == [(results[0]["at"], 86)] * 4


def test_all_ranks_stretch_alike(tmp_path: Path) -> None:
    first, second = run_ranks(_observe_expensively, 2, str(tmp_path), strict=True)
    assert first == second
    assert first["stretch"] >= 500


def _close_alone(rank: int, _: int, folder: str) -> dict[str, Any]:
    """Rank 1 closes its monitor, and trains on; the others observe nothing after that."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(Path(folder), interval=4))
    records = train(model, optimizer, monitor, range(1, 6))
    dist.barrier()
    if rank == 1:
        monitor.close()
    train(model, optimizer, monitor, range(6, 8))
    total = torch.ones(1)
    dist.all_reduce(total)
    monitor.close()
    return {"steps": [record.step for record in records], "total": float(total)}


def test_closing_on_one_rank_enters_no_collective_and_destroys_nothing(tmp_path: Path) -> None:
    for found in run_ranks(_close_alone, 2, str(tmp_path), strict=True):
        assert found == {"steps": [4], "total": 2.0}

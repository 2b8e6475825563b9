"""The check of the two transports: two ranks train with each, and the records must be equal."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import distmon
from distmon.device import is_accelerator
from distmon.selftest.not_here import SIMULATED, NotHere, device_name

RANKS: Final = 2
_TIMEOUT: Final = timedelta(seconds=120)
Train = Callable[..., distmon.Record]


def transports(device: torch.device, train: Train) -> str:
    """Train on two ranks with `transport: host` and, where there are two devices, `device`."""
    if is_accelerator(device) and device_name(device) == SIMULATED:
        raise NotHere("the ranks of the simulated device have tests of their own")
    # NCCL refuses two ranks on one device.
    alone = is_accelerator(device) and torch.accelerator.device_count() < RANKS
    tried = ("host",) if alone else ("host", "device")
    found = {transport: _records(transport, device.type, alone, train) for transport in tried}
    for transport, metrics in found.items():
        assert metrics == found["host"], f"{transport} differs from host"
    detail = f"{RANKS} ranks, {' and '.join(tried)}: equal records"
    return f"{detail}; the other one needs two devices" if alone else detail


def _records(transport: str, kind: str, alone: bool, train: Train) -> dict[str, float]:
    """Return the metrics of the last record, which must be the same on both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        start = "spawn" if kind != "cpu" else "forkserver"  # a device does not survive a fork
        arguments = (folder, transport, kind, alone, train)
        mp.start_processes(_train_rank, arguments, nprocs=RANKS, start_method=start)  # type: ignore[no-untyped-call,attr-defined]
        texts = {(Path(folder) / f"rank{rank}").read_text() for rank in range(RANKS)}
    assert len(texts) == 1, "the ranks have different records"
    found: dict[str, float] = json.loads(texts.pop())
    return found


def _train_rank(
    rank: int, folder: str, transport: str, kind: str, alone: bool, train: Train
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    device = torch.device(kind, 0 if alone else rank) if kind != "cpu" else torch.device("cpu")
    if kind != "cpu":
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        "gloo" if alone or kind == "cpu" else f"cpu:gloo,{kind}:nccl",
        store=dist.FileStore(f"{folder}/store", RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=RANKS,
        timeout=_TIMEOUT,
    )
    record = train(device, 5, transport=transport, run_dir=Path(folder) / f"run-{rank}")
    assert not record.faults, record.faults
    wanted = ("monitor/grad_norm", "monitor/update_ratio_median", "train/step_loss")
    metrics = {name: record.metrics[name] for name in wanted}
    (Path(folder) / f"rank{rank}").write_text(json.dumps(metrics))
    dist.barrier()
    dist.destroy_process_group()

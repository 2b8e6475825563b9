"""One rank of a DDP training on a host of its own; writes how long its steps took."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def main(
    rank: int, address: str, interface: str, folder: Path, monitored: bool, timeout_s: int
) -> None:
    """`timeout_s` is that of the job's own collectives."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29511"}
    os.environ |= {"GLOO_SOCKET_IFNAME": interface}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = None
    if monitored:
        import distmon

        monitor = distmon.attach(
            model, optimizer, run_dir=folder / "run", interval=2, sinks=["jsonl"], budget=None
        )
    losses, longest, error = [], 0.0, ""
    began = time.monotonic()
    try:
        for step in range(STEPS):
            begin = time.monotonic()
            (folder / f"step{rank}").write_text(str(step))
            optimizer.zero_grad()
            loss = model(torch.full((4, 16), 0.1 * (step + rank))).square().mean()
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.step(loss=loss)
            losses.append(float(loss.detach()))
            longest = max(longest, time.monotonic() - begin)
            time.sleep(0.05)
        if monitor is not None:
            monitor.close()
    except RuntimeError as failed:  # the training's own collective
        longest = max(longest, time.monotonic() - begin)
        error = str(failed)
    result = {
        "losses": losses,
        "longest": longest,
        "error": error,
        "seconds": time.monotonic() - began,
    }
    (folder / f"result{rank}").write_text(json.dumps(result))

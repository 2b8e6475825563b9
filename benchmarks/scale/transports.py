"""Compare the transports on gloo ranks: what an observation costs each rank, side by side.

    python -m benchmarks.scale.transports --ranks 2,4

Every rank trains a small model under DDP with one monitor per transport, which observe in turn. The
last rows have one rank that comes 200 ms late to every observation.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distmon

TRANSPORTS: Final = ("host", "device")
DELAY_S: Final = 0.2
TENSORS, WIDTH = 150, 96
OBSERVATIONS: Final = 30


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
) -> None:
    """Print a table: milliseconds of the training thread per observation, median."""
    table = Table(title=f"{TENSORS} matrices of {WIDTH}x{WIDTH}, DDP, gloo, medians of ms")
    for title in (
        "ranks",
        "transport",
        "one rank late",
        "rank 0",
        "other ranks",
        "waits",
        "bytes",
        "collectives",
    ):
        table.add_column(title, justify="right")
    for world in map(int, ranks.split(",")):
        for delay in (0.0, DELAY_S):
            for transport, row in _measure(world, delay).items():
                late = f"{1000 * delay:.0f} ms" if delay else "no"
                table.add_row(str(world), transport, late, *row)
    Console().print(table)


def _measure(world: int, delay: float) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (world, folder, delay), nprocs=world)  # type: ignore[no-untyped-call]
        found = [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(world)]
    return {transport: _row([each[transport] for each in found]) for transport in TRANSPORTS}


def _row(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    others = [ms for each in by_rank[1:] for ms in each["step_ms"]]
    return [
        f"{_median(by_rank[0]['step_ms']):.2f}",
        f"{_median(others):.2f}",
        f"{_median(by_rank[0]['wait_ms']):.2f}",
        f"{by_rank[0]['bytes']:.0f}",
        f"{by_rank[0]['collectives']:.0f}",
    ]


def _run_rank(rank: int, world: int, folder: str, delay: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(TENSORS))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = {
        transport: _observe(rank, model, optimizer, transport, Path(folder), delay)
        for transport in TRANSPORTS
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _observe(
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    transport: str,
    folder: Path,
    delay: float,
) -> dict[str, Any]:
    monitor = distmon.attach(
        model,
        optimizer,
        interval=4,
        transport=transport,
        budget=None,
        sinks=["jsonl"],
        run_dir=folder / transport,
    )
    step_ms, wait_ms = [], []
    for step in range(1, 4 * OBSERVATIONS + 1):
        optimizer.zero_grad()
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 4:
            monitor.step(loss=loss)  # takes in what has arrived
            continue
        if rank == 1:
            time.sleep(delay)
        begin, busy = time.perf_counter(), time.thread_time()
        monitor.step(loss=loss)
        seconds, busy = time.perf_counter() - begin, time.thread_time() - busy
        step_ms.append(1000 * seconds)
        wait_ms.append(1000 * max(0.0, seconds - busy))
    record = monitor.last_record
    monitor.close()
    metrics = record.metrics if record else {}
    return {
        "step_ms": step_ms[2:],
        "wait_ms": wait_ms[2:],
        "bytes": metrics.get("performance/monitor_bytes", float("nan")),
        "collectives": metrics.get("performance/monitor_collectives", float("nan")),
    }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    typer.run(main)

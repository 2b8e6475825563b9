"""The race on several gloo ranks on this machine's CPU, under DDP and FSDP2.

Ranks wait for each other before anything is timed, so rank 0 measures its own work and the
collectives. A collective of as many bytes is timed alone, in turn: what an observation takes beyond
it should not grow with the number of ranks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead.models import Matrices
from benchmarks.overhead.workloads import square_loss
from distmon.bench.contender import Contender, Observed, Session
from distmon.bench.contenders import EXACT, NAIVE_CLONE, NONE, SAMPLED
from distmon.bench.costs import COLLECTIVE
from distmon.bench.counting import count
from distmon.bench.interleaved import Rounds, race
from distmon.bench.results import Case, ResultsWriter
from distmon.bench.training import LEARNING_RATE, Training, Workload

TIMEOUT: Final = timedelta(minutes=5)
RACING: Final = (NONE, SAMPLED, EXACT, NAIVE_CLONE)
SMALL: Final = Workload(
    "small",
    "200 matrices of 128x128, 8 rows on every rank",
    partial(Matrices, 200, 128),
    partial(square_loss, 8, 128),
)


def _sharded(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    return fully_shard(model)


PARALLEL: Final[Mapping[str, Callable[[nn.Module], nn.Module]]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": _sharded,
}


@dataclass
class RankResult:
    """What one rank measured."""

    numbers: list[tuple[str, str, int, float]] = field(default_factory=list)
    """Contender, measure, round and value."""
    wrong: dict[str, str] = field(default_factory=dict)
    """What is wrong with an answer, by contender; empty text for a right one."""
    failed: dict[str, str] = field(default_factory=dict)


def write_race(parallel: str, ranks: int, rounds: int, writer: ResultsWriter) -> None:
    """Race on `ranks` processes and write the numbers of rank 0. A rank that dies raises."""
    with tempfile.TemporaryDirectory() as folder:
        # A core for each while there are enough.
        threads = max(1, torch.get_num_threads() // ranks)
        mp.spawn(_run_rank, (ranks, parallel, rounds, threads, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        results = [
            RankResult(**json.loads(Path(folder, f"rank{rank}.json").read_text()))
            for rank in range(ranks)
        ]
    merged = merge(results)
    sizes = [p.numel() for p in SMALL.build().parameters()]
    case = Case("small", "fp32", parallel, ranks, len(sizes), sum(sizes), SMALL.conditions)
    for number in merged.numbers:
        writer.add(case, *number)
    for name, why in merged.failed.items():
        writer.add(case, name, "failed", 0, 0.0, why)
    for name, what in merged.wrong.items():
        writer.add(case, name, "answer", 0, float(not what), what)


def merge(results: Sequence[RankResult]) -> RankResult:
    """Return the numbers of rank 0; an answer is wrong and a contender fails when any rank's does.

    A contender that failed has no numbers.
    """
    merged = RankResult()
    for rank, result in enumerate(results):
        merged.failed |= {name: f"rank {rank}: {why}" for name, why in result.failed.items()}
        for name, what in result.wrong.items():
            found = f"rank {rank}: {what}" if what else ""
            merged.wrong[name] = merged.wrong.get(name) or found
    merged.numbers = [each for each in results[0].numbers if each[0] not in merged.failed]
    return merged


def _run_rank(rank: int, ranks: int, parallel: str, rounds: int, threads: int, folder: str) -> None:
    torch.set_num_threads(threads)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        result = race_here(rank, parallel, rounds, SMALL, Path(folder, str(rank)))
        Path(folder, f"rank{rank}.json").write_text(json.dumps(asdict(result)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def race_here(
    rank: int, parallel: str, rounds: int, workload: Workload, folder: Path
) -> RankResult:
    """Run this rank's part of the race; a process group must exist. Each rank has a folder."""
    training = _training(workload, parallel, rank)
    result, sent = _counted(training, folder / "counted")
    contenders = [*RACING]
    if sent:
        begin = partial(CollectiveSession, sent_bytes=sent)
        contenders.append(Contender(COLLECTIVE, "all_reduce alone", "directly", begin))
    for lane in race(training, contenders, folder, Rounds(rounds)):
        name = lane.contender.name
        if lane.failed is not None:
            result.failed[name] = lane.failed
        elif lane.contender.finds:
            result.wrong[name] = lane.check.wrong or ""
        for found in lane.found:
            if name != COLLECTIVE:
                result.numbers.append((name, found.measure, found.round, found.value))
            elif found.measure == "observation":
                result.numbers.append((name, "collective", found.round, found.value))
    return result


def _training(workload: Workload, parallel: str, rank: int) -> Training:
    torch.manual_seed(0)
    model = PARALLEL[parallel](workload.build())
    torch.manual_seed(rank)  # every rank has its own data
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    device = torch.device("cpu")
    return Training(model, optimizer, lambda: workload.loss(model, device), device, dist.barrier)


def _counted(training: Training, folder: Path) -> tuple[RankResult, int]:
    """Return collectives and bytes of each contender, and the bytes of sampled distmon."""
    result, sent = RankResult(), 0
    for _ in range(2):  # DDP builds its buckets in the first steps
        training.step(Session())
    bare = count(lambda: training.step(Session()))
    for contender in RACING:
        if contender is NONE:
            continue
        session = contender.attach(training.model, training.optimizer, folder / contender.name)
        training.step(session)  # ranks agree on something in the first step,
        session.settle()  # and send nothing before they have
        counts = count(partial(training.step, session)) - bare
        session.detach()
        result.numbers += [
            (contender.name, "collectives", 0, counts.collectives),
            (contender.name, "sent_bytes", 0, counts.sent_bytes),
        ]
        if contender is SAMPLED:
            sent = counts.sent_bytes
    return result, sent


class CollectiveSession(Session):
    """Nothing but an all_reduce."""

    def __init__(self, _: Observed, sent_bytes: int) -> None:
        self._buffer = torch.zeros(max(1, sent_bytes // 8), dtype=torch.float64)

    def after_step(self, loss: torch.Tensor) -> None:  # noqa: ARG002
        dist.all_reduce(self._buffer)

"""The race on several gloo ranks, under DDP and FSDP2, on this machine's CPU.

Ranks wait for each other before anything is timed, so what rank 0 measures is its own work and the
collectives. How long a collective of as many bytes takes alone is measured in turn: what an
observation takes beyond it should not grow with the number of ranks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distmon_benchmarks.contenders import Contender, Session, find
from distmon_benchmarks.contenders.contender import Watched
from distmon_benchmarks.contenders.distmon_monitor import SAMPLED
from distmon_benchmarks.contenders.none import NONE
from distmon_benchmarks.counting import count
from distmon_benchmarks.interleaved import race
from distmon_benchmarks.models import Matrices
from distmon_benchmarks.results import Case
from distmon_benchmarks.training import LEARNING_RATE, Training
from distmon_benchmarks.workloads import Workload, square_loss

TIMEOUT: Final = timedelta(minutes=5)
NAMES: Final = ("none", "distmon sampled", "distmon exact", "naive clone")
COLLECTIVE: Final = "all_reduce"

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
    """What one rank found: (contender, measure, round, value), and who was wrong."""

    numbers: list[tuple[str, str, int, float]] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)


def run(
    parallel: str, ranks: int, rounds: int, workload: Workload = SMALL
) -> tuple[Case, RankResult]:
    """Race on `ranks` processes; the numbers are those of rank 0. A failed rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        # A core for each while there are enough.
        threads = max(1, torch.get_num_threads() // ranks)
        mp.spawn(_rank, (ranks, parallel, rounds, workload, threads, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        results = [
            RankResult(**json.loads(Path(folder, f"rank{rank}.json").read_text()))
            for rank in range(ranks)
        ]
    sizes = [p.numel() for p in workload.build().parameters()]
    return Case(workload.name, "fp32", parallel, ranks, len(sizes), sum(sizes)), together(results)


def together(results: Sequence[RankResult]) -> RankResult:
    """The numbers of rank 0; who was wrong on any rank has none."""
    wrong = {name: problem for result in results for name, problem in result.wrong.items()}
    return RankResult([each for each in results[0].numbers if each[0] not in wrong], wrong)


def _rank(
    rank: int,
    ranks: int,
    parallel: str,
    rounds: int,
    workload: Workload,
    threads: int,
    folder: str,
) -> None:
    torch.set_num_threads(threads)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        result = race_here(rank, parallel, rounds, workload, Path(folder, str(rank)))
        Path(folder, f"rank{rank}.json").write_text(json.dumps(asdict(result)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def race_here(
    rank: int, parallel: str, rounds: int, workload: Workload, folder: Path
) -> RankResult:
    """This rank's part of the race, in a process group that is there.

    Each rank has a folder: only rank 0 writes, but nobody has to know that.
    """
    training = _training(workload, parallel, rank)
    contenders = find(NAMES)
    result, sent = _counted(training, contenders, folder / "counted")
    if sent:
        contenders.append(_collective(sent))
    for lane in race(training, contenders, folder, rounds, limit_s=inf):
        name = lane.contender.name
        if lane.wrong is not None:
            result.wrong[name] = lane.wrong
        for found in lane.findings:
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


def _counted(
    training: Training, contenders: Sequence[Contender], folder: Path
) -> tuple[RankResult, int]:
    """Collectives and bytes of each contender, and the bytes of sampled distmon."""
    result, sent = RankResult(), 0
    for _ in range(2):  # DDP arranges its buckets in the first steps
        training.turn(Session())
    bare = count(lambda: training.turn(Session()))
    for contender in contenders:
        session = contender.attach(training.model, training.optimizer, folder / contender.name)
        training.turn(session)  # the first step may agree on something
        counts = count(lambda session=session: training.turn(session)) - bare
        session.detach()
        if contender is NONE:
            continue
        result.numbers += [
            (contender.name, "collectives", 0, counts.collectives),
            (contender.name, "sent_bytes", 0, counts.sent_bytes),
        ]
        if contender is SAMPLED:
            sent = counts.sent_bytes
    return result, sent


class CollectiveSession(Session):
    """Nothing but an all_reduce."""

    def __init__(self, sent_bytes: int) -> None:
        self._buffer = torch.zeros(max(1, sent_bytes // 8), dtype=torch.float64)

    def after_step(self, loss: torch.Tensor) -> None:  # noqa: ARG002
        dist.all_reduce(self._buffer)


def _collective(sent_bytes: int) -> Contender:
    def begin(_: Watched) -> CollectiveSession:
        return CollectiveSession(sent_bytes)

    return Contender(COLLECTIVE, "an all_reduce of as many bytes, alone", "directly", begin)

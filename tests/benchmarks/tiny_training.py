"""A training small enough for tests, and contenders whose behavior is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead.models import Gpt2, Matrices
from benchmarks.overhead.workloads import language_loss, square_loss
from benchmarks.scale.ranks import RankResult, race_here
from distmon.bench.contender import Answer, Contender, Norms, Session
from distmon.bench.training import Dtype, Training, Workload

CPU = torch.device("cpu")
TINY_GPT = Workload(
    "tiny", "a tiny GPT-2", partial(Gpt2, 2, 64, 2, 300, 32), partial(language_loss, 1, 16, 300)
)
TINY_MATRICES = Workload(
    "matrices",
    "10 matrices",
    partial(Matrices, 10, 16),
    partial(square_loss, 4, 16),
    growth=True,
)


def begin(workload: Workload = TINY_GPT, dtype: Dtype = "fp32") -> Training:
    return Training.begin(workload, dtype, CPU)


def contender(name: str, session: Session, **fields: Any) -> Contender:
    """A contender whose `attach` returns this session."""
    return Contender(name, name, fields.pop("timing", "directly"), lambda _: session, **fields)


class Claims(Session):
    """Returns the answer that it was given."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def answer(self) -> Answer:
        return self._answer


def race_on_rank(rank: int, world: int, folder: str) -> RankResult:  # noqa: ARG001
    """What `run_ranks` calls on every rank."""
    return race_here(rank, "fsdp2", 2, TINY_MATRICES, Path(folder, str(rank)))


NOTHING_RIGHT = Claims({"wte.weight": Norms(grad=1e9)})

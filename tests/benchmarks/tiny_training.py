"""A training small enough for tests, and contenders that do something known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from distmon_benchmarks.contenders import Contender, Norms, Session
from distmon_benchmarks.contenders.contender import Answer
from distmon_benchmarks.models import Gpt2, Matrices
from distmon_benchmarks.ranks import RankResult, race_here
from distmon_benchmarks.training import Training
from distmon_benchmarks.workloads import Dtype, Workload, language_loss, square_loss

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
    """A contender whose `attach` gives what is told here."""
    return Contender(name, name, fields.pop("timing", "directly"), lambda _: session, **fields)


class Claims(Session):
    """Says whatever it was told to say."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def answer(self) -> Answer:
        return self._answer


def race_on_rank(rank: int, world: int, folder: str) -> RankResult:  # noqa: ARG001
    """What `run_ranks` calls on every rank."""
    return race_here(rank, "fsdp2", 2, TINY_MATRICES, Path(folder, str(rank)))


NOTHING_RIGHT = Claims({"wte.weight": Norms(grad=1e9)})

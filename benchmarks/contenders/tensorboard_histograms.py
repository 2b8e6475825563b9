"""TensorBoard's histograms of all weights and gradients."""

from __future__ import annotations

from math import sqrt
from typing import Any, Final

import torch

from distmon.bench.contender import (
    Answer,
    Contender,
    Norms,
    Observed,
    Session,
    trainable_parameters,
)


class HistogramSession(Session):
    """Two histograms per parameter."""

    def __init__(self, observed: Observed) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._parameters = dict(trainable_parameters(observed.model))
        self._folder = observed.folder / "tb"
        self._writer: Any = SummaryWriter(str(self._folder))
        self._step = 0

    def after_step(self, loss: torch.Tensor) -> None:
        self._step += 1
        add = self._writer.add_histogram
        for name, p in self._parameters.items():
            # NumPy makes the histograms, and it has no bfloat16.
            add(f"parameters/{name}", p.detach().float(), self._step)
            if p.grad is not None:
                add(f"gradients/{name}", p.grad.float(), self._step)
        self._writer.add_scalar("loss", loss, self._step)

    def detach(self) -> None:
        self._writer.close()

    def answer(self) -> Answer:
        written = self._written()
        return {
            name: Norms(
                weight=written[f"parameters/{name}"],
                grad=written.get(f"gradients/{name}"),
            )
            for name in self._parameters
        }

    def tags(self) -> int:
        return len(self._written())

    def _written(self) -> dict[str, float | None]:
        """Return the norm of each histogram of the last observation in the files, by tag."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        found: dict[str, float | None] = {}
        for path in self._folder.glob("events.*"):
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value if event.step == self._step else ():
                    squares = value.histo.sum_squares if value.HasField("histo") else None
                    found[value.tag] = None if squares is None else sqrt(squares)
        return found


TENSORBOARD: Final = Contender(
    name="tensorboard",
    description="SummaryWriter.add_histogram of every weight and gradient",
    timing="directly",
    begin=HistogramSession,
    finds=("weight", "grad"),
    in_growth=False,
    package="tensorboard",
    install="pip install 'distmon[tensorboard]'",
)

"""The rows of everything that is watched: two tables on the device, sent as they are."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from distmon.collect.inside.catalog import Catalog
from distmon.device import is_capturing


class Watching:
    """Whether forward passes are measured now. Shared by the hooks of one monitor."""

    def __init__(self) -> None:
        self.armed = False
        self.in_training_forward = False
        """Whether the whole model is in a forward that records a graph."""
        self.fault: Exception | None = None
        """The newest failure of a hook; it does not reach the training."""
        self.seconds = 0.0
        """Time that the hooks took so far."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return one that stays off: the hooks of a copied model belong to no monitor."""
        return Watching, ()

    def failed(self, error: Exception, *rows: torch.Tensor) -> None:
        """Keep an error of a hook, and make its sums NaN, which no sum over ranks can hide."""
        self.fault = error
        with suppress(Exception):
            for row in rows:
                row.fill_(math.nan)

    def counts(self, training: bool, device: torch.device) -> bool:
        """Return whether a call of a module is part of the training forward of an observed step.

        A checkpointed block is called again in the backward pass; the first call counts. That one
        may record no graph, unlike the forward of the model around it.
        """
        recorded = self.in_training_forward or torch.is_grad_enabled()
        return training and recorded and self.counts_in_graph(device)

    def counts_in_graph(self, device: torch.device) -> bool:
        """Return the same for a call in a compiled graph, which is one of a training forward."""
        return self.armed and not in_backward() and not is_capturing(device)


def in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


class Tables:
    """All rows of a catalog: `sums` are added over ranks, of `maxima` the largest counts."""

    def __init__(self, catalog: Catalog, device: torch.device) -> None:
        self.catalog = catalog
        self.sums = torch.zeros(catalog.sums, dtype=torch.float64, device=device)
        self.maxima = torch.full((catalog.maxima,), -math.inf, device=device)

    def clear(self) -> None:
        """Begin a measurement."""
        self.sums.zero_()
        self.maxima.fill_(-math.inf)

    def activation(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums and maxima of an activation."""
        return self._row(row, self.catalog.rows_of_activations)

    def attention(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums and maxima of a module with attention."""
        return self._row(row, self.catalog.rows_of_attention)

    def _row(self, row: int, segment: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sums = segment.sums + row * segment.sum_columns
        maxima = segment.maxima + row * segment.max_columns
        return (
            self.sums[sums : sums + segment.sum_columns],
            self.maxima[maxima : maxima + segment.max_columns],
        )

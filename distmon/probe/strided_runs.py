"""Runs of gradients whose elements do not lie in memory in the order of their indices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import RUN
from distmon.sampling.gradient_runs import GradientRuns, Runs, cut_runs, pack_runs

Strides = tuple[tuple[int, tuple[int, ...]], ...]
"""Parameters whose gradient is not contiguous, and its strides."""


MemoryRuns = tuple[NDArray[np.int64], NDArray[np.uint8]] | tuple[None, None]
"""Offsets and codes of runs; None where there are none."""


class RunsByStrides:
    """The runs of sampled gradients, with offsets for the strides that gradients have now."""

    def __init__(self, runs: GradientRuns) -> None:
        self._contiguous = runs
        self._sampled = frozenset(np.flatnonzero(np.diff(runs.first)).tolist())
        self._strided: tuple[Strides, GradientRuns] = ((), runs)
        self._by_row: dict[
            tuple[int, tuple[int, ...]], tuple[NDArray[np.int64], NDArray[np.uint8]]
        ] = {}

    def current(self, strided: Mapping[int, torch.Tensor]) -> GradientRuns:
        """Return the runs, `strided` being the gradients that are not contiguous, by parameter."""
        read = {row: grad for row, grad in strided.items() if row in self._sampled}
        if not read:
            return self._contiguous
        strides = tuple((row, grad.stride()) for row, grad in read.items())
        if strides != self._strided[0]:
            self._strided = strides, runs_in_memory(self._contiguous, read)
        return self._strided[1]

    def of_row(self, row: int, grad: torch.Tensor) -> MemoryRuns:
        """Return offsets and codes of the runs of one gradient that is not contiguous, on the host.

        Made once for its strides; None for a gradient that is not sampled by runs.
        """
        if row not in self._sampled:
            return None, None
        key = (row, grad.stride())
        if key not in self._by_row:
            runs, here = self._contiguous, slice(*self._contiguous.first[row : row + 2])
            held = (
                runs.offsets[here].long().cpu().numpy(),
                runs.lengths[here].cpu().numpy(),
                runs.groups[here].cpu().numpy(),
            )
            offsets, lengths, groups = _in_memory(held, grad)
            codes = (lengths - 1 + (groups << 3)).astype(np.uint8)
            self._by_row[key] = np.ascontiguousarray(offsets, dtype=np.int64), codes
        return self._by_row[key]


def runs_in_memory(runs: GradientRuns, strided: Mapping[int, torch.Tensor]) -> GradientRuns:
    """Return the runs with offsets in memory for the `strided` gradients, given by parameter.

    A run is cut where its elements are not neighbors in memory. Waits for the device; called when a
    gradient has strides that it did not have before.
    """
    tables = (runs.offsets.long(), runs.lengths, runs.groups)
    offsets, lengths, groups = (table.cpu().numpy() for table in tables)
    held: list[Runs] = []
    for row in range(len(runs.first) - 1):
        here = slice(runs.first[row], runs.first[row + 1])
        found = offsets[here], lengths[here], groups[here]
        held.append(_in_memory(found, strided[row]) if row in strided else found)
    return pack_runs(held, runs.offsets.device)


def _in_memory(runs: Runs, grad: torch.Tensor) -> Runs:
    offsets, lengths, groups = runs
    lanes = np.arange(RUN)
    used = lanes < lengths[:, None]
    elements = np.where(used, offsets[:, None] + lanes, 0)
    memory = np.zeros_like(elements)
    for place, stride in zip(np.unravel_index(elements, grad.shape), grad.stride(), strict=True):
        memory += place * stride
    return cut_runs(np.where(used, memory, -1), groups)

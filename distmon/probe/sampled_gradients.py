"""Gradient columns over the runs of `GradientRuns`, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from csrc_triton.row_layout import BY_LANE, GROUPS, MAX, RUN, SUM
from distmon.layout import Shard
from distmon.probe.finite import highest, is_nonzero, take_out_nonfinite
from distmon.probe.rows import Rows
from distmon.sampling.plan import SamplePlan

PART_RUNS = 1 << 14
"""Runs that are read at once: 131 072 elements and their temporaries stay in a core's cache."""
_COLUMNS = ("g_count", "g_sum", "g_nan", "g_inf", "g_zero")


class SampledGradients:
    """Replaces gradient columns by those over the runs that this rank reads."""

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._runs = plan.gradient_runs
        self._dtype = plan.dtype
        self._lanes = torch.arange(RUN, device=plan.device)
        self._rows = np.flatnonzero(np.diff(self._runs.first)).tolist()

    def fill(self, rows: Rows, applied: torch.Tensor) -> None:
        """Overwrite the gradient columns, not the histogram. `applied` as in `Probe.measure`."""
        for row in self._rows:
            grad = self._shards[row].grad()
            if grad is not None:
                self._fill_one(rows, row, grad.detach(), applied[row])

    def _fill_one(self, rows: Rows, row: int, grad: torch.Tensor, applied: torch.Tensor) -> None:
        total = torch.zeros(5 + GROUPS, dtype=torch.float64, device=grad.device)
        extremes = torch.full((2,), -torch.inf, device=grad.device)
        end = int(self._runs.first[row + 1])
        for begin in range(int(self._runs.first[row]), end, PART_RUNS):
            values, groups = self._read(grad, slice(begin, min(begin + PART_RUNS, end)))
            extremes = torch.maximum(
                extremes, torch.cat((highest(values), highest(-values))).float()
            )
            nan, inf = take_out_nonfinite(values)
            zeros = values.shape[1] - is_nonzero(values).sum(1) - nan - inf
            wide = values[0].double()
            total[0] += values.shape[1]
            total[1] += wide.sum()
            total[2:5] += torch.cat((nan, inf, zeros))
            total[5:].index_add_(0, groups, wide.square_())
        total *= applied
        for name, number in zip(_COLUMNS, total, strict=False):
            rows.sums[row, SUM[name]] = number
        rows.sums[row, SUM["g_sq0"] : SUM["g_sq0"] + GROUPS] = total[5:]
        rows.maxima[row, MAX["g_max"] : MAX["g_negmin"] + 1] = torch.where(
            applied > 0, extremes, -torch.inf
        )

    def _read(self, grad: torch.Tensor, runs: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements of these runs, [1, elements], and the group of each."""
        codes = self._runs.codes[runs].long()
        group = (codes >> 3)[:, None]
        used = self._lanes <= (codes & (RUN - 1))[:, None]
        group = torch.where(group < BY_LANE, group, group - BY_LANE + self._lanes)
        elements = self._runs.offsets[runs].long()[:, None] + self._lanes
        values = _gather(grad, elements[used]).to(self._dtype, copy=True)
        return values.view(1, -1), group.expand_as(used)[used]


def _gather(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the elements at flat `offsets` without copying the tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1).index_select(0, offsets)
    return tensor[torch.unravel_index(offsets, tensor.shape)]

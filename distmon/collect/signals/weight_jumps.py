"""Weights that changed between two observations by more than the optimizer can have done.

A layer that was reset, a checkpoint that was loaded, a parameter that was replaced: the distance of
its sample from that of the last observation is compared with steps x update norm.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from csrc_triton.row_layout import GROUPS, SUM
from distmon.probe.plan_rows import rows_by_parameter
from distmon.sampling.plan import SamplePlan

KEPT: Final = 64
"""Elements of each matrix that are kept from one observation to the next."""
_FLOOR: Final = 0.05
"""A relative distance that is never remarkable."""


class WeightJumps:
    """Keeps a part of the sample and finds the matrix that went farthest beyond its updates."""

    def __init__(self, plan: SamplePlan, matrices: list[int], device: torch.device) -> None:
        """`matrices`: the parameters that are compared."""
        rows = rows_by_parameter(plan, len(plan.names))
        picked = []
        self._rows = [row for row in matrices if rows.widths[row] > 1]
        for row in self._rows:
            width = int(rows.widths[row])
            at = np.unique(np.linspace(0, width - 1, min(KEPT, width)).astype(np.int64))
            picked.append(int(rows.starts[row]) + at)
        index = np.concatenate(picked) if picked else np.zeros(0, np.int64)
        owner = np.repeat(np.arange(len(picked)), [len(at) for at in picked])
        self._index = torch.from_numpy(index).to(device)
        self._owner = torch.from_numpy(owner).to(device)
        self._matrix_rows = torch.tensor(self._rows, dtype=torch.int64, device=device)
        self._before: torch.Tensor | None = None
        self._ratio_before: torch.Tensor | None = None
        self._step = 0

    @torch.no_grad()
    def compare(
        self, step: int, plan: SamplePlan, sums: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return [relative distance, expected distance, row] of the farthest; None at first.

        `plan.snapshot` holds the sample before this step, `sums` the rows of this observation.
        """
        if not self._rows or sums is None:
            return None
        now = plan.snapshot[self._index].to(torch.float64)
        first = SUM["u_sq0"], SUM["w_sq0"]
        update, weight = (sums[self._matrix_rows, at : at + GROUPS].sum(1) for at in first)
        ratio = torch.sqrt(update / weight.clamp_min(1e-60))
        before, ratio_before, steps = self._before, self._ratio_before, step - self._step
        self._before, self._ratio_before, self._step = now, ratio, step
        if before is None or ratio_before is None or steps <= 0:
            return None
        zeros = torch.zeros(len(self._rows), dtype=torch.float64, device=now.device)
        apart = zeros.index_add(0, self._owner, (now - before).square())
        size = zeros.index_add(0, self._owner, torch.maximum(now.square(), before.square()))
        relative = torch.sqrt(apart / size.clamp_min(1e-60)).nan_to_num(0.0, 0.0, 0.0)
        expected = (steps * torch.maximum(ratio, ratio_before)).nan_to_num(math.inf, math.inf)
        # Kept as a vector: indexing with a single number of the device would wait for it.
        worst = torch.argmax(relative / (expected + _FLOOR), dim=0, keepdim=True)
        row = self._matrix_rows[worst].to(torch.float64)
        return torch.cat([relative[worst], expected[worst], row])

"""Weights that changed between two observations by more than the optimizer can have done.

A layer that was reset, a checkpoint that was loaded, a parameter that was replaced: the distance of
its sample from that of the last observation is compared with steps x update norm.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, SUM
from distmon.device import to_device
from distmon.native import NativeModule
from distmon.probe.plan_rows import rows_by_parameter
from distmon.sampling.plan import SamplePlan

KEPT: Final = 64
"""Elements of each matrix that are kept from one observation to the next."""
_FLOOR: Final = 0.05
"""A relative distance that is never remarkable."""


class WeightJumps:
    """Keeps a part of the sample and finds the matrix that went farthest beyond its updates."""

    def __init__(
        self,
        plan: SamplePlan,
        matrices: list[int],
        device: torch.device,
        native: NativeModule | None = None,
    ) -> None:
        """`matrices`: the parameters that are compared; `native` compares faster on a CPU."""
        self._native = native if device.type == "cpu" else None
        self._matrices = np.array(matrices, dtype=np.int64)
        self._lay_out(plan)

    def _lay_out(self, plan: SamplePlan) -> None:
        """Find the kept elements in the snapshot of `plan`, and begin anew."""
        self._plan, device = plan, plan.device
        self._snapshot: NDArray[Any] = plan.snapshot.numpy() if self._native else np.zeros(0)
        rows = rows_by_parameter(plan, len(plan.names))
        compared = self._matrices
        compared = compared[rows.widths[compared] > 1]
        self._rows = compared.tolist()
        widths = rows.widths[compared].astype(np.int64)
        count = np.minimum(KEPT, widths)
        number = np.arange(KEPT)
        spread = number * (widths - 1)[:, None] // np.maximum(count - 1, 1)[:, None]
        owner, at = np.nonzero(number < count[:, None])
        index = rows.starts[compared][owner] + spread[owner, at]
        self._begins = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        self._host = index, compared
        self._kept = np.zeros(len(index)), np.zeros(len(compared))
        self._index = to_device(torch.from_numpy(index), device)
        self._owner = to_device(torch.from_numpy(owner), device)
        self._matrix_rows = to_device(torch.from_numpy(compared), device)
        self._before: torch.Tensor | None = None
        self._ratio_before: torch.Tensor | None = None
        self._step = 0
        self._began = False

    def compare(
        self, step: int, plan: SamplePlan, sums: torch.Tensor | None
    ) -> torch.Tensor | list[float] | None:
        """Return [relative distance, expected distance, row] of the farthest; None at first.

        `plan.snapshot` holds the sample before this step, `sums` the rows of this observation.
        """
        if plan is not self._plan:  # a parameter was replaced: slots have moved
            self._lay_out(plan)
        if not self._rows or sums is None:
            return None
        if self._native is not None and sums.is_cpu:
            return self._compare_on_host(step, sums, self._native)
        return self._compare_on_device(step, plan, sums)

    def _compare_on_host(
        self, step: int, sums: torch.Tensor, native: NativeModule
    ) -> list[float] | None:
        (index, rows), (before, ratios) = self._host, self._kept
        steps, self._step = step - self._step, step
        first, self._began = not self._began, True
        found = native.farthest_jump(
            self._snapshot.size,
            len(rows),
            len(index),
            sums.shape[0],
            self._snapshot.itemsize,
            steps,
            _FLOOR,
            self._snapshot,
            self._begins,
            index,
            rows,
            sums.numpy(),
            before,
            ratios,
        )
        return None if first or steps <= 0 else found

    @torch.no_grad()
    def _compare_on_device(
        self, step: int, plan: SamplePlan, sums: torch.Tensor
    ) -> torch.Tensor | None:
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

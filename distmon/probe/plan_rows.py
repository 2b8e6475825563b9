"""The plan's chunks as tables in parameter order, for kernels that take one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS
from distmon.sampling.plan import SamplePlan


@dataclass(frozen=True)
class PlanRows:
    """Row i is parameter i; see `csrc_triton.tables.RowTables` for what the tables mean."""

    starts: NDArray[np.int64]
    widths: NDArray[np.int32]
    """0 where nothing is here."""
    group_counts: torch.Tensor
    half_ulp: torch.Tensor


def rows_by_parameter(plan: SamplePlan, parameters: int) -> PlanRows:
    """Spread the chunks of `plan` over its parameters; tensors are on the plan's device."""
    starts, widths = np.zeros(parameters, np.int64), np.zeros(parameters, np.int32)
    counts = torch.zeros((parameters, GROUPS), dtype=torch.int32, device=plan.device)
    half_ulp = torch.zeros(parameters, dtype=torch.float64, device=plan.device)
    begin = 0
    for chunk in plan.chunks:
        slots = chunk.offsets.shape[1]
        where = torch.from_numpy(chunk.rows).to(plan.device)
        counts.index_copy_(0, where, chunk.group_counts)
        half_ulp.index_copy_(0, where, chunk.half_ulp)
        starts[chunk.rows] = begin + slots * np.arange(len(chunk.rows))
        widths[chunk.rows] = chunk.width
        begin += chunk.offsets.numel()
    return PlanRows(starts, widths, counts, half_ulp)


def offsets_by_parameter(plan: SamplePlan, parameters: int) -> list[torch.Tensor | None]:
    """Return the slots' offsets of each parameter, None where nothing is here."""
    offsets: list[torch.Tensor | None] = [None] * parameters
    for chunk in plan.chunks:
        for row, each in zip(chunk.rows.tolist(), chunk.offsets.unbind(0), strict=True):
            offsets[row] = each
    return offsets

"""The native probe: the same rows as the torch probe from one compiled pass, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from csrc_triton.row_layout import GROUPS
from distmon.layout import Shard
from distmon.native import WHOLE_GRAD, WHOLE_WEIGHT, NativeModule
from distmon.probe.address_table import AddressTable
from distmon.probe.exact import count_whole_gradients
from distmon.probe.plan_rows import rows_by_parameter
from distmon.probe.rows import Rows
from distmon.probe.strided_runs import RunsByStrides
from distmon.probe.torch_probe import odd_multipliers
from distmon.sampling.plan import SamplePlan


class NativeProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it.

    Reads by address, so it keeps the interpreter lock: nobody can free a gradient meanwhile. That
    takes a millisecond for a hundred parameters.
    """

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard], native: NativeModule) -> None:
        self._shards = shards
        self._native = native
        rows = rows_by_parameter(plan, len(shards))
        self._addresses = AddressTable(shards, rows.offsets, native)
        if self._addresses.device.type != "cpu" or plan.device.type != "cpu":
            raise ValueError(f"it reads CPU memory, not that of {self._addresses.device}")
        self._runs = RunsByStrides(plan.gradient_runs)
        self._numels = np.array([s.weight().numel() for s in shards], dtype=np.int64)
        self._wanted = np.zeros(len(shards), dtype=np.uint8)
        self._wanted[plan.whole_weights] |= WHOLE_WEIGHT
        self._wanted[plan.whole_gradients] |= WHOLE_GRAD
        self._in_full = np.flatnonzero(self._wanted).tolist()
        self._bins_in_full = plan.reading.whole_weights
        widest = int(rows.widths.max(initial=0))
        multipliers = odd_multipliers(widest * GROUPS, plan.device).view(widest, GROUPS)
        self._tables = (
            len(shards),
            plan.snapshot.numel(),
            plan.offsets.element_size(),
            plan.snapshot.element_size(),
            self._addresses.table.numpy(),
            rows.starts,
            rows.widths,
            rows.group_counts.numpy(),
            plan.snapshot.numpy(),
        )
        self._constants = (widest, rows.half_ulp.numpy(), multipliers.T.contiguous().numpy())
        self.row_checksums = torch.zeros(len(shards), dtype=torch.int64)

    @property
    def without_grad(self) -> list[int]:
        """Return the parameters of which the last `measure` read no gradient."""
        return self._addresses.without_grad()

    @torch.no_grad()
    def snapshot(self) -> None:
        """Keep the sampled weights as they are now."""
        self._addresses.refresh(grads=False)
        self._native.take_snapshot(*self._tables)

    @torch.no_grad()
    def measure(self, rows: Rows, applied: torch.Tensor) -> None:
        """Fill `rows` from the weights, gradients and snapshot; see `TorchProbe.measure`."""
        self._addresses.refresh(grads=True)
        taken, sums, maxima = applied.numpy(), rows.sums.numpy(), rows.maxima.numpy()
        bins = None if rows.bins is None else rows.bins.numpy()
        checksums = self.row_checksums.numpy()
        self._native.fill_sampled_rows(
            *self._tables, *self._constants, taken, sums, maxima, bins, checksums
        )
        runs = self._runs.current(self._addresses.strided["grad"])
        self._native.fill_gradient_runs(
            len(self._shards),
            len(runs.codes),
            runs.offsets.element_size(),
            self._addresses.table.numpy(),
            runs.first,
            runs.offsets.numpy(),
            runs.codes.numpy(),
            taken,
            sums,
            maxima,
        )
        if self._in_full:
            # It lets other threads run, so what it reads must outlive whatever they do.
            kept = [(self._shards[i].weight(), self._shards[i].grad()) for i in self._in_full]
            addresses = self._addresses.dense().numpy()
            self._native.fill_exact_columns(
                torch.get_num_threads(),
                len(self._shards),
                addresses,
                self._numels,
                self._wanted,
                taken,
                sums,
                maxima,
                bins if self._bins_in_full else None,
            )
            del kept

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        count_whole_gradients(self._shards, rows, parameters)

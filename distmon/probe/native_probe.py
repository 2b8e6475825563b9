"""The native probe: the same rows as the torch twin from one compiled pass, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from distmon.layout import Shard
from distmon.native import NativeModule
from distmon.probe.address_table import AddressTable
from distmon.probe.exact import count_whole_gradients
from distmon.probe.plan_rows import rows_by_parameter
from distmon.probe.rows import Rows
from distmon.probe.torch_twin import odd_multipliers
from distmon.sampling import SamplePlan


class NativeProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it.

    It reads by address, so it keeps the interpreter's lock: nobody can free a gradient meanwhile.
    That is a millisecond for a hundred parameters.
    """

    def __init__(
        self, plan: SamplePlan, shards: Sequence[Shard], exact: bool, native: NativeModule
    ) -> None:
        self._shards = shards
        self._native = native
        rows = rows_by_parameter(plan, len(shards))
        self._addresses = AddressTable(shards, rows.offsets, native)
        if self._addresses.device.type != "cpu" or plan.device.type != "cpu":
            raise ValueError(f"it reads memory of the CPU, not of {self._addresses.device}")
        self._numels = np.array([s.weight().numel() for s in shards], dtype=np.int64)
        self._exact = exact
        widest = int(rows.widths.max(initial=0))
        multipliers = odd_multipliers(widest * rows.group_counts.shape[1], plan.device)
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
        self._constants = (widest, rows.half_ulp.numpy(), multipliers.numpy())
        self.row_checksums = torch.zeros(len(shards), dtype=torch.int64)

    @property
    def without_grad(self) -> list[int]:
        """Parameters of which the last `measure` read no gradient."""
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
        if self._exact:
            # It lets other threads run, so what it reads must outlive whatever they do.
            kept = [(s.weight(), s.grad()) for s in self._shards]
            addresses = self._addresses.dense().numpy()
            self._native.fill_exact_columns(
                torch.get_num_threads(),
                len(kept),
                addresses,
                self._numels,
                taken,
                sums,
                maxima,
                bins,
            )

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        count_whole_gradients(self._shards, rows, parameters)

"""The Triton probe: the same rows as the torch twin from one snapshot and one statistics launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from csrc_triton.address_layout import dtype_set
from csrc_triton.exact_stats import ExactTables, fill_exact_columns
from csrc_triton.sampled_stats import fill_sampled_rows
from csrc_triton.snapshot import take_snapshot
from csrc_triton.tables import RowOutputs, RowTables
from distmon.layout import Shard
from distmon.native import NativeModule
from distmon.probe.address_table import AddressTable
from distmon.probe.exact import count_whole_gradients
from distmon.probe.plan_rows import rows_by_parameter
from distmon.probe.rows import Rows
from distmon.sampling import SamplePlan


class TritonProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it.

    All memory is allocated here; the calls launch kernels and, when a tensor moved, one copy.
    """

    def __init__(
        self,
        plan: SamplePlan,
        shards: Sequence[Shard],
        exact: bool = False,
        native: NativeModule | None = None,
    ) -> None:
        """`native` finds out faster what moved."""
        self._shards = shards
        dtype_set(s.weight().dtype for s in shards)  # names a dtype that cannot be read
        rows = rows_by_parameter(plan, len(shards))
        self._addresses = AddressTable(shards, rows.offsets, native)
        if self._addresses.device != plan.device:
            raise ValueError(
                f"the parameters are on {self._addresses.device}, the plan on {plan.device}"
            )
        device = plan.device
        self._tables = RowTables(
            addresses=self._addresses.table,
            starts=torch.from_numpy(rows.starts).to(device),
            widths=torch.from_numpy(rows.widths).to(device),
            group_counts=rows.group_counts,
            half_ulp=rows.half_ulp,
            snapshot=plan.snapshot,
            offset_dtype=plan.offsets.dtype,
            widest=int(rows.widths.max(initial=0)),
        )
        self._exact: ExactTables | None = None
        if exact:
            self._exact = ExactTables.build([s.weight().numel() for s in shards], device)
        self.row_checksums = torch.zeros(len(shards), dtype=torch.int64, device=device)

    @property
    def without_grad(self) -> list[int]:
        """Parameters of which the last `measure` read no gradient."""
        return self._addresses.without_grad()

    @torch.no_grad()
    def snapshot(self) -> None:
        """Keep the sampled weights as they are now."""
        with self._on_device():
            self._addresses.refresh(grads=False)
            take_snapshot(self._tables, self._addresses.dtypes)

    @torch.no_grad()
    def measure(self, rows: Rows, applied: torch.Tensor) -> None:
        """Fill `rows` from the weights, gradients and snapshot; see `TorchProbe.measure`."""
        outputs = RowOutputs(rows.sums, rows.maxima, rows.bins, self.row_checksums)
        with self._on_device():
            self._addresses.refresh(grads=True)
            dtypes = self._addresses.dtypes
            fill_sampled_rows(self._tables, applied, outputs, dtypes)
            if self._exact is not None:
                addresses = self._addresses.dense()
                value = self._tables.snapshot.dtype
                fill_exact_columns(self._exact, addresses, applied, outputs, dtypes, value)

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        count_whole_gradients(self._shards, rows, parameters)

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, which need not be the model's."""
        device = self._tables.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

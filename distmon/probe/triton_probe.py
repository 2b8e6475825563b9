"""The Triton probe: the same rows as the torch twin from one snapshot and one statistics launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.dtypes import dtype_set
from csrc_triton.exact_stats import ExactTables, fill_exact_columns
from csrc_triton.row_layout import GROUPS, SUM
from csrc_triton.sampled_stats import fill_sampled_rows
from csrc_triton.snapshot import take_snapshot
from csrc_triton.tables import RowOutputs, RowTables
from distmon.layout import Shard
from distmon.probe.address_table import AddressTable, is_dense
from distmon.probe.rows import Rows
from distmon.sampling import SamplePlan


class TritonProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it.

    All memory is allocated here; the calls launch kernels and, when a tensor moved, one copy.
    """

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard], exact: bool = False) -> None:
        self._shards = shards
        dtype_set(s.weight().dtype for s in shards)  # names a dtype that cannot be read
        starts, widths, counts, half_ulp, offset_rows = _per_parameter(plan, len(shards))
        self._addresses = AddressTable(shards, offset_rows)
        if self._addresses.device != plan.device:
            raise ValueError(
                f"the parameters are on {self._addresses.device}, the plan on {plan.device}"
            )
        device = plan.device
        self._tables = RowTables(
            addresses=self._addresses.table,
            starts=torch.from_numpy(starts).to(device),
            widths=torch.from_numpy(widths).to(device),
            group_counts=counts,
            half_ulp=half_ulp,
            snapshot=plan.snapshot,
            offset_dtype=plan.offsets.dtype,
            widest=int(widths.max(initial=0)),
        )
        self._exact: ExactTables | None = None
        if exact:
            self._exact = ExactTables.build([s.weight().numel() for s in shards], device)
            self._exact_addresses = torch.zeros_like(self._addresses.table)
        self._copies: list[torch.Tensor] = []
        self.row_checksums = torch.zeros(len(shards), dtype=torch.int64, device=device)

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
                addresses = self._dense_addresses()
                value = self._tables.snapshot.dtype
                fill_exact_columns(self._exact, addresses, applied, outputs, dtypes, value)

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        for i in parameters:
            grad = self._shards[i].grad()
            rows.sums[i, SUM["whole_count"]] = self._shards[i].weight().numel()
            if grad is not None:
                rows.sums[i, SUM["whole_nonzero"]] = torch.count_nonzero(grad)

    def _dense_addresses(self) -> torch.Tensor:
        """Addresses for the exact pass, which reads memory from one end to the other.

        Order does not matter to sums, so a transposed tensor is read as it lies. Only a view with
        gaps is copied, and only while it is read.
        """
        self._copies = []
        changed: dict[str, dict[int, int]] = {"weight": {}, "grad": {}}
        for what, tensors in self._addresses.strided.items():
            for row, tensor in tensors.items():
                if not is_dense(tensor):
                    self._copies.append(tensor.contiguous())
                    changed[what][row] = self._copies[-1].data_ptr()
        if not self._copies:
            return self._addresses.table
        self._addresses.with_addresses(self._exact_addresses, changed)
        return self._exact_addresses

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, which need not be the model's."""
        device = self._tables.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _per_parameter(
    plan: SamplePlan, parameters: int
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int32],
    torch.Tensor,
    torch.Tensor,
    list[torch.Tensor | None],
]:
    """The plan's chunks as tables in parameter order; rows that are not here have width 0."""
    starts, widths = np.zeros(parameters, np.int64), np.zeros(parameters, np.int32)
    counts = torch.zeros((parameters, GROUPS), dtype=torch.int32, device=plan.device)
    half_ulp = torch.zeros(parameters, dtype=torch.float64, device=plan.device)
    offset_rows: list[torch.Tensor | None] = [None] * parameters
    begin = 0
    for chunk in plan.chunks:
        slots = chunk.offsets.shape[1]
        where = torch.from_numpy(chunk.rows).to(plan.device)
        counts.index_copy_(0, where, chunk.group_counts)
        half_ulp.index_copy_(0, where, chunk.half_ulp)
        for k, row in enumerate(chunk.rows):
            starts[row], widths[row] = begin + k * slots, chunk.width
            offset_rows[row] = chunk.offsets[k]
        begin += chunk.offsets.numel()
    return starts, widths, counts, half_ulp, offset_rows

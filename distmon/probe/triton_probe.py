"""The Triton probe: the same rows as the torch probe, from launches over all parameters at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from csrc_triton.address_layout import DTYPE_CODES, dtype_set
from csrc_triton.exact_stats import ExactTables, fill_exact_columns
from csrc_triton.gradient_runs import RunTables, fill_run_columns
from csrc_triton.nonfinite_counts import count_nonfinite
from csrc_triton.sampled_stats import fill_sampled_rows
from csrc_triton.snapshot import take_snapshot
from csrc_triton.tables import RowOutputs, RowTables
from distmon.device import on_device
from distmon.layout import Shard
from distmon.native import NativeModule
from distmon.probe.address_table import AddressTable
from distmon.probe.exact import count_whole_gradients
from distmon.probe.plan_rows import offsets_by_parameter, rows_by_parameter
from distmon.probe.rows import Rows
from distmon.probe.strided_runs import RunsByStrides
from distmon.probe.tensor_places import What
from distmon.sampling.gradient_runs import GradientRuns
from distmon.sampling.plan import SamplePlan

Strides = tuple[tuple[int, tuple[int, ...]], ...]
"""Row and strides of each sampled gradient that is not contiguous."""


class TritonProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it.

    All memory is allocated here; the calls launch kernels and, when a tensor moved, one copy.
    """

    has_own_slots = False

    def __init__(
        self,
        plan: SamplePlan,
        shards: Sequence[Shard],
        native: NativeModule | None = None,
    ) -> None:
        """`native` finds out faster what moved."""
        self._shards = shards
        self._plan = plan
        numels = [s.weight().numel() for s in shards]
        self._dtype_sets = _expected_dtype_sets(shards)  # names a dtype that cannot be read
        rows = rows_by_parameter(plan, len(shards))
        self._addresses = AddressTable(shards, offsets_by_parameter(plan, len(shards)), native)
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
        self._exact = ExactTables.build(
            weights={i: numels[i] for i in plan.whole_weights},
            gradients={i: numels[i] for i in plan.whole_gradients},
            device=device,
            histogram=plan.reading.whole_weights,
        )
        self._in_full: dict[What, frozenset[int]] = {
            "weight": frozenset(plan.whole_weights),
            "grad": frozenset(plan.whole_gradients),
        }
        self._runs = RunsByStrides(plan.gradient_runs)
        self._run_tables = self._tabulate(plan.gradient_runs)
        self._numels = numels
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
            take_snapshot(self._tables, self._dtypes())

    @torch.no_grad()
    def measure(self, rows: Rows, applied: torch.Tensor) -> None:
        """Fill `rows` from the weights, gradients and snapshot; see `TorchProbe.measure`."""
        with self._on_device():
            self._addresses.refresh(grads=True)
            self._fill(rows, applied, self._dtypes())

    @torch.no_grad()
    def compile(self, rows: Rows) -> None:
        """Launch every kernel that training may need; `rows` are overwritten.

        With and without a histogram, and for gradients of another dtype than the weights'.
        """
        applied = torch.zeros(len(self._shards), dtype=torch.float64, device=self._tables.device)
        with self._on_device():
            self._addresses.refresh(grads=True)
            for dtypes in self._dtype_sets:
                take_snapshot(self._tables, dtypes)
                for filled in (rows, replace(rows, bins=None)):
                    self._fill(filled, applied, dtypes)
                self._count(dtypes)

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        count_whole_gradients(self._shards, rows, parameters)

    @torch.no_grad()
    def count_nonfinite(self) -> torch.Tensor:
        """Count as `nonfinite_counts` does: one launch for all tensors, and one wait."""
        with self._on_device():
            self._addresses.refresh(grads=True)
            return self._count(self._dtypes()).cpu()

    def _count(self, dtypes: int) -> torch.Tensor:
        addresses = self._addresses.dense()
        return count_nonfinite(addresses, self._numels, dtypes, self._plan.dtype)

    def _fill(self, rows: Rows, applied: torch.Tensor, dtypes: int) -> None:
        outputs = RowOutputs(rows.sums, rows.maxima, rows.bins, self.row_checksums)
        fill_sampled_rows(self._tables, applied, outputs, dtypes)
        runs, addresses = self._current_runs(), self._addresses.table
        fill_run_columns(runs, addresses, applied, outputs, dtypes, self._plan.dtype)
        if self._reads_strided_in_full():
            addresses = self._addresses.dense()
        fill_exact_columns(self._exact, addresses, applied, outputs, dtypes, self._plan.dtype)

    def _dtypes(self) -> int:
        """Return the smallest of the expected dtype sets that has every dtype seen so far."""
        seen = self._addresses.dtypes
        for dtypes in self._dtype_sets:
            if seen | dtypes == dtypes:
                return dtypes
        return seen

    def _current_runs(self) -> RunTables:
        """Return the tables of runs for the strides that gradients have now."""
        runs = self._runs.current(self._addresses.strided["grad"])
        if runs is not self._run_tables[0]:
            self._run_tables = self._tabulate(runs)
        return self._run_tables[1]

    def _tabulate(self, runs: GradientRuns) -> tuple[GradientRuns, RunTables]:
        return runs, RunTables.build(runs.first, runs.offsets, runs.codes)

    def _reads_strided_in_full(self) -> bool:
        strided = self._addresses.strided
        return any(not rows.isdisjoint(strided[what]) for what, rows in self._in_full.items())

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Triton launches on the current device, which need not be the model's."""
        try:
            with on_device(self._tables.device):
                yield
        finally:
            self._addresses.release()


def _expected_dtype_sets(shards: Sequence[Shard]) -> tuple[int, ...]:
    """Return the dtypes of all weights, then with those that gradients may have besides.

    Kernels are compiled for a set, so that one that is not expected compiles during training.
    Gradients have the dtype of the parameter that autograd sees, that of the weight, or float32
    where they are accumulated; those of fp8 weights are bfloat16.
    """
    weights = dtype_set(s.weight().dtype for s in shards)
    gradients = {s.parameter.dtype for s in shards if s.parameter is not None}
    if any(s.dtype.itemsize == 1 for s in shards):
        gradients.add(torch.bfloat16)
    if any(s.dtype.itemsize < 4 for s in shards):
        gradients.add(torch.float32)
    both = weights | dtype_set(gradients & DTYPE_CODES.keys())
    return (weights,) if both == weights else (weights, both)

"""The native probe: the same rows as the torch probe from one compiled pass, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from csrc_triton.address_layout import dtype_set
from csrc_triton.row_layout import GROUPS, count_bits
from distmon.layout import Shard
from distmon.native import WHOLE_GRAD, WHOLE_WEIGHT, Missing, NativeModule, RowReader
from distmon.probe.address_table import in_memory_order, is_dense
from distmon.probe.exact import count_whole_gradients, nonfinite_counts
from distmon.probe.plan_rows import rows_by_parameter
from distmon.probe.rows import Rows
from distmon.probe.strided_runs import MemoryRuns, RunsByStrides
from distmon.probe.tensor_places import What, place_of, row_readers, tensors_to_follow
from distmon.sampling.plan import SamplePlan


class NativeProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it.

    One call of the compiled reader each, which finds all tensors and reads them. It keeps the
    interpreter lock meanwhile, so that no gradient can be freed: a few milliseconds at most.
    Tensors that it cannot find, or that are not contiguous, are found here first.
    """

    has_own_slots = True

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard], native: NativeModule) -> None:
        if plan.device.type != "cpu" or any(not s.weight().is_cpu for s in shards):
            raise ValueError(f"it reads CPU memory, not that of {plan.device}")
        dtype_set(s.weight().dtype for s in shards)  # names a dtype that cannot be read
        self._shards = shards
        self._finders = row_readers(shards)
        self._runs = RunsByStrides(plan.gradient_runs)
        self._bins_in_full = plan.reading.whole_weights
        self._rows = rows_by_parameter(plan, len(shards))
        self._translated: dict[tuple[What, int, tuple[int, ...]], torch.Tensor] = {}
        self.without_grad: list[int] = []
        """Parameters of which the last `measure` read no gradient."""
        self.row_checksums = torch.zeros(len(shards), dtype=torch.int64)
        self._checksums = self.row_checksums.numpy()
        self._reader = self._make_reader(plan, native)

    def _make_reader(self, plan: SamplePlan, native: NativeModule) -> RowReader:
        rows, runs = self._rows, plan.gradient_runs
        wanted = np.zeros(len(self._shards), dtype=np.uint8)
        wanted[plan.whole_weights] |= WHOLE_WEIGHT
        wanted[plan.whole_gradients] |= WHOLE_GRAD
        return native.row_reader(
            tensors_to_follow(self._shards, native),
            plan.snapshot.numel(),
            plan.offsets.element_size(),
            rows.starts,
            rows.widths,
            rows.group_counts.numpy(),
            plan.offsets.numpy(),
            plan.snapshot.element_size(),
            plan.snapshot.numpy(),
            rows.half_ulp.numpy(),
            len(runs.codes),
            runs.offsets.element_size(),
            runs.first,
            runs.offsets.numpy(),
            runs.codes.numpy(),
            np.array([s.weight().numel() for s in self._shards], dtype=np.int64),
            wanted,
        )

    def snapshot(self) -> None:
        """Keep the sampled weights as they are now."""
        threads = torch.get_num_threads()
        missing = self._reader.snapshot(False, threads)
        if missing is not None:
            kept = self._place(missing)
            self._expect_found(self._reader.snapshot(True, threads))
            del kept

    def measure(self, rows: Rows, applied: torch.Tensor) -> None:
        """Fill `rows` from the weights, gradients and snapshot; see `TorchProbe.measure`."""
        words = 0 if rows.bins is None else rows.bins.shape[1]
        out = (
            torch.get_num_threads(),
            self._bins_in_full,
            words,
            count_bits(words) if words else 0,
            applied.numpy(),
            *rows.arrays,
            self._checksums,
        )
        found = self._reader.measure(False, *out)
        if isinstance(found, tuple):
            kept = self._place(found)
            found = self._reader.measure(True, *out)
            del kept
        self.without_grad = self._expect_found(found)

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        count_whole_gradients(self._shards, rows, parameters)

    def count_nonfinite(self) -> torch.Tensor:
        """Return `nonfinite_counts` of the shards."""
        return nonfinite_counts(self._shards)

    @torch.no_grad()
    def _place(self, missing: Missing) -> list[torch.Tensor]:
        """Pass the places of these tensors to the reader; return them, to be kept meanwhile."""
        kept: list[torch.Tensor] = []
        both: tuple[tuple[What, list[int]], ...] = (("weight", missing[0]), ("grad", missing[1]))
        for what, rows in both:
            for row in rows:
                tensor = self._finders[what][row]()  # names what is wrong with it
                address, code, contiguous = place_of(tensor)
                dense = address
                slots: torch.Tensor | None = None
                runs: MemoryRuns = (None, None)
                if tensor is not None:
                    kept.append(tensor)
                if tensor is not None and not contiguous:
                    if not is_dense(tensor):
                        kept.append(tensor.contiguous())
                        dense = kept[-1].data_ptr()
                    slots = self._slots_in_memory(what, row, tensor)
                    runs = self._runs.of_row(row, tensor) if what == "grad" else runs
                self._reader.place(
                    what == "grad",
                    row,
                    address,
                    dense,
                    code,
                    0 if slots is None else slots.element_size(),
                    None if slots is None else slots.numpy(),
                    *runs,
                )
        return kept

    def _slots_in_memory(self, what: What, row: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the row's offsets in the tensor's memory order; made once for its strides.

        Empty for a row of which no sample is here: it may have runs all the same.
        """
        key = (what, row, tensor.stride())
        if key not in self._translated:
            slots = torch.zeros(GROUPS * int(self._rows.widths[row]), dtype=torch.int64)
            self._reader.write_offsets(row, slots.numpy())
            self._translated[key] = in_memory_order(slots, tensor)
        return self._translated[key]

    @staticmethod
    def _expect_found(found: list[int] | Missing | None) -> list[int]:
        if isinstance(found, tuple):
            raise RuntimeError("tensors moved while they were being found")
        return found or []

"""The plain-torch probe: any device, and the default on CPU.

Samples of many parameters are gathered into one [rows, slots] buffer, then a handful of operations
fill all their columns at once; there is no per-parameter statistic and no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from csrc_triton.row_layout import GROUPS, HALF_BINS, SCALAR_COLUMNS
from distmon.device import to_device
from distmon.layout import Shard
from distmon.probe.exact import WholePass, count_whole_gradients, nonfinite_counts
from distmon.probe.finite import highest, is_nonzero, take_out_nonfinite
from distmon.probe.log_bins import histogram_by_row, pack_bins
from distmon.probe.rows import Rows
from distmon.probe.sampled_gradients import SampledGradients
from distmon.sampling.plan import Chunk, SamplePlan

_EXPONENT_MASK = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class TorchProbe:
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it."""

    has_own_slots = False

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._sampled_gradients = SampledGradients(plan, shards)
        self._whole = WholePass(plan, shards)
        largest = max((c.offsets.numel() for c in plan.chunks), default=0)
        scratch = torch.empty((2, largest), dtype=plan.dtype, device=plan.device)
        self._blocks = [_Block(c, shards, scratch) for c in plan.chunks]
        self._multipliers = odd_multipliers(
            max((c.offsets.shape[1] for c in plan.chunks), default=0), plan.device
        )
        self.row_checksums = torch.zeros(len(shards), dtype=torch.int64, device=plan.device)
        self.without_grad: list[int] = []

    @torch.no_grad()
    def snapshot(self) -> None:
        """Keep the sampled weights as they are now."""
        for block in self._blocks:
            block.gather_weights(block.snapshot_rows)
            block.set_padding(block.chunk.snapshot, 0.0)

    @torch.no_grad()
    def measure(self, rows: Rows, applied: torch.Tensor) -> None:
        """Fill `rows` from the weights, gradients and snapshot.

        `applied` is float64 [parameters]: 1 where the optimizer stepped the parameter since the
        snapshot, 0 where it did not; there the gradient and update columns stay empty.
        """
        rows.clear()
        self.without_grad = []
        for block in self._blocks:
            present = block.fill(rows, applied, self._multipliers, self.row_checksums)
            self.without_grad += [
                int(row) for row, there in zip(block.chunk.rows, present, strict=True) if not there
            ]
        self._sampled_gradients.fill(rows, applied)
        self._whole.fill(rows, applied)

    @torch.no_grad()
    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None:
        """Count the non-zero gradients of the given parameters in full."""
        count_whole_gradients(self._shards, rows, parameters)

    def count_nonfinite(self) -> torch.Tensor:
        """Return `nonfinite_counts` of the shards."""
        return nonfinite_counts(self._shards)


class _Block:
    """One chunk with its scratch memory and per-row views, made once."""

    def __init__(self, chunk: Chunk, shards: Sequence[Shard], scratch: torch.Tensor) -> None:
        self.chunk = chunk
        self.shards = [shards[i] for i in chunk.rows]
        self.used = chunk.group_counts.sum(1).double()
        self.row_ids = torch.from_numpy(chunk.rows).to(chunk.offsets.device)
        shape = chunk.offsets.shape
        self.weights = scratch[0, : chunk.offsets.numel()].view(shape)
        self.grads = scratch[1, : chunk.offsets.numel()].view(shape)
        # Slicing a row costs more than gathering it, so the views are kept.
        self.offset_rows = chunk.offsets.unbind(0)
        self.snapshot_rows = chunk.snapshot.unbind(0)
        self.weight_rows = self.weights.unbind(0)
        self.grad_rows = self.grads.unbind(0)

    def gather_weights(self, out: Sequence[torch.Tensor]) -> None:
        for shard, offsets, target in zip(self.shards, self.offset_rows, out, strict=True):
            _gather(shard.weight(), offsets, target)

    def gather_grads(self) -> list[float]:
        """Fill the gradient scratch; 1.0 for each row that has a gradient."""
        present: list[float] = []
        for shard, offsets, target in zip(
            self.shards, self.offset_rows, self.grad_rows, strict=True
        ):
            grad = shard.grad()
            if grad is None:
                target.zero_()
            else:
                _gather(grad, offsets, target)
            present.append(float(grad is not None))
        return present

    def set_padding(self, gathered: torch.Tensor, value: float) -> None:
        """Unused slots have read some element of the tensor; put `value` there instead."""
        if self.chunk.padding is not None:
            gathered.masked_fill_(self.chunk.padding, value)

    def fill(
        self,
        rows: Rows,
        applied: torch.Tensor,
        multipliers: torch.Tensor,
        checksums: torch.Tensor,
    ) -> list[float]:
        """Fill the rows of the chunk; returns what `gather_grads` does."""
        chunk, w, g = self.chunk, self.weights, self.grads
        self.gather_weights(self.weight_rows)
        present = self.gather_grads()
        has_grad = to_device(torch.tensor(present, dtype=torch.float64), w.device)
        self.set_padding(w, 0.0)
        bits = w.view(_BITS[w.dtype])
        by_group = multipliers[: w.shape[1]].view(-1, GROUPS).T.reshape(-1)
        checksums.index_copy_(0, self.row_ids, (bits * by_group).sum(1))

        taken = applied.index_select(0, self.row_ids)
        graded = has_grad * taken
        # Extremes are over finite elements, so what is not one is out of their way as NaN.
        self.set_padding(w, torch.nan)
        self.set_padding(g, torch.nan)
        unused = w.shape[1] - self.used
        extremes = (highest(w.abs()), highest(g), highest(-g))
        delta = torch.nan_to_num_(w - chunk.snapshot, 0.0, 0.0, 0.0)
        w_nan, w_inf = take_out_nonfinite(w, unused)
        g_nan, g_inf = take_out_nonfinite(g, unused)
        has_gradient = is_nonzero(g)
        nonzero = has_gradient.sum(1)
        lost = (has_gradient * is_nonzero(w)).mul_(1 - is_nonzero(delta))
        # The exponent bits alone are the power of two at or below |w|; times the dtype's half ulp
        # of 1.0 that is the largest update rounding can swallow.
        binade = ((bits & _EXPONENT_MASK[w.dtype]).view(w.dtype) * lost).double()
        bound_sq = binade.square_().sum(1) * chunk.half_ulp.square()
        not_sampled = unused + g_nan + g_inf
        w_sum, w_squares = _sums(w)
        g_sum, g_squares = _sums(g)
        u_sum, u_squares = _sums(delta)
        columns = {
            "w_count": self.used,
            "w_sum": w_sum,
            "w_nan": w_nan,
            "w_inf": w_inf,
            "g_count": self.used * graded,
            "g_sum": g_sum * graded,
            "g_nan": g_nan * graded,
            "g_inf": g_inf * graded,
            "g_zero": (w.shape[1] - nonzero - not_sampled) * graded,
            "u_count": self.used * taken,
            "u_sum": u_sum * taken,
            "u_graded": nonzero * graded,
            "u_lost": lost.sum(1) * graded,
            "u_lost_bound_sq": bound_sq * graded,
        }
        nothing = torch.zeros_like(taken)
        scalars = torch.stack([columns.get(name, nothing) for name in SCALAR_COLUMNS], 1)
        squares = (w_squares, g_squares * graded[:, None], u_squares * taken[:, None])
        rows.sums.index_copy_(0, self.row_ids, torch.cat((scalars, *squares), 1))

        maxima = (
            extremes[0],
            _where(graded, extremes[1]),
            _where(graded, extremes[2]),
            _where(taken, delta.abs().amax(1)),
        )
        rows.maxima.index_copy_(0, self.row_ids, torch.stack(maxima, 1).float())
        if rows.bins is not None:
            bins = histogram_by_row(g)
            bins[:, HALF_BINS] -= not_sampled
            words = pack_bins(bins * graded[:, None], rows.bins.shape[1])
            rows.bins.index_copy_(0, self.row_ids, words)
        return present


def odd_multipliers(count: int, device: torch.device) -> torch.Tensor:
    """Fixed odd 64-bit numbers: a checksum weighted by them notices swapped elements too.

    Slot c of group g takes number c * GROUPS + g, so that a row's checksum does not depend on how
    wide its chunk is on this rank.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = golden * np.arange(1, count + 1, dtype=np.uint64)
        z = ((z ^ (z >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64).copy()).to(device)


def _gather(tensor: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the elements at flat `offsets` into `out` without copying the tensor."""
    if not tensor.is_contiguous():
        out.copy_(tensor[torch.unravel_index(offsets.long(), tensor.shape)])
    elif tensor.dtype == out.dtype:
        torch.index_select(tensor.view(-1), 0, offsets, out=out)
    else:
        out.copy_(tensor.view(-1).index_select(0, offsets))


def _sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum by row and sums of squares by group, in float64: float32 squares under- and overflow."""
    x64 = x.to(torch.float64, copy=True)
    total = x64.sum(1)
    return total, x64.square_().view(len(x), GROUPS, -1).sum(2)


def _where(present: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """The maximum where something was measured, else the identity of MAX."""
    return torch.where(present > 0, maximum, -torch.inf)

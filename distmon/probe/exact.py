"""Columns over every element of a tensor, part by part, without a copy of any tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch

from csrc_triton.row_layout import BINS, GROUPS, HALF_BINS, MAX, SUM
from distmon.layout import Shard
from distmon.probe.finite import highest, is_nonzero, take_out_nonfinite
from distmon.probe.log_bins import histogram_by_row, pack_bins
from distmon.probe.rows import Rows
from distmon.sampling.plan import SamplePlan

# A part and its temporaries stay in a core's cache.
PART_ELEMENTS = 1 << 17
# On an accelerator a launch costs more than the cache saves; temporaries are one byte an element.
DEVICE_PART_ELEMENTS = 1 << 26


class WholePass:
    """Replaces sampled columns by those over every element; updates stay sampled."""

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._weights = plan.whole_weights
        self._gradients = plan.whole_gradients
        self._bins = plan.reading.whole_weights

    def fill(self, rows: Rows, applied: torch.Tensor) -> None:
        """Overwrite the columns of the parameters held here. `applied` as in `Probe.measure`."""
        for i in self._weights:
            weight = self._shards[i].weight()
            rows.sums[i, SUM["w_count"]] = weight.numel()
            self._fill_one(rows, i, "w", weight, None)
        for i in self._gradients:
            grad = self._shards[i].grad()
            if grad is not None:
                rows.sums[i, SUM["g_count"]] = grad.numel() * applied[i]
                self._fill_one(rows, i, "g", grad, applied[i])

    def _fill_one(
        self, rows: Rows, i: int, what: str, tensor: torch.Tensor, applied: torch.Tensor | None
    ) -> None:
        total = torch.zeros(5, dtype=torch.float64, device=tensor.device)
        extremes = torch.full((2,), -torch.inf, device=tensor.device)
        bins = None
        if self._bins and rows.bins is not None and what == "g":
            bins = torch.zeros(BINS, dtype=torch.float64, device=tensor.device)
        for part in parts(tensor):
            wide = part.dtype if part.dtype == torch.float64 else torch.float32
            x = part.to(wide, copy=True).view(1, -1)
            extremes = torch.maximum(extremes, torch.cat((highest(x), highest(-x))).float())
            nan, inf = take_out_nonfinite(x)
            zeros = x.shape[1] - is_nonzero(x).sum(1) - nan - inf
            if bins is not None:
                bins += histogram_by_row(x)[0]
                bins[HALF_BINS] -= (nan + inf)[0]
            x64 = x.to(torch.float64, copy=True)
            total += torch.cat((x64.sum(1), x64.square_().sum(1), nan, inf, zeros))
        if applied is not None:
            total = total * applied
            extremes = torch.where(applied > 0, extremes, -torch.inf)
            if bins is not None and rows.bins is not None:
                rows.bins[i] = pack_bins(bins * applied, rows.bins.shape[1])
        first = SUM[f"{what}_sq0"]
        rows.sums[i, first : first + GROUPS] = 0
        rows.sums[i, first] = total[1]
        rows.sums[i, SUM[f"{what}_sum"]] = total[0]
        rows.sums[i, SUM[f"{what}_nan"]] = total[2]
        rows.sums[i, SUM[f"{what}_inf"]] = total[3]
        if what == "g":
            rows.sums[i, SUM["g_zero"]] = total[4]
            rows.maxima[i, MAX["g_max"] : MAX["g_negmin"] + 1] = extremes
        else:
            rows.maxima[i, MAX["w_absmax"]] = extremes.amax()


def parts(tensor: torch.Tensor, size: int = PART_ELEMENTS) -> Iterator[torch.Tensor]:
    """Yield flat parts of a tensor that together hold every element once, without copying it."""
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.detach().view(-1), size)
    elif tensor.dim() == 1 or tensor[0].numel() <= size:
        # Order does not matter to sums, so slices along the first dimension may be copied singly.
        rows = max(1, size // max(1, tensor[0].numel()))
        for part in torch.split(tensor.detach(), rows):
            yield part.reshape(-1)
    else:
        for part in tensor.detach():
            yield from parts(part, size)


def count_whole_gradients(shards: Sequence[Shard], rows: Rows, parameters: Iterable[int]) -> None:
    """Fill the columns that count the non-zero gradients of the given parameters in full."""
    for i in parameters:
        grad = shards[i].grad()
        rows.sums[i, SUM["whole_count"]] = shards[i].weight().numel()
        if grad is not None:
            rows.sums[i, SUM["whole_nonzero"]] = torch.count_nonzero(grad)


NONFINITE: Final = ("w_nan", "w_inf", "g_nan", "g_inf")
"""Columns of the counts of NaN and Inf, in the order of `nonfinite_counts`."""


def nonfinite_counts(shards: Sequence[Shard]) -> torch.Tensor:
    """Return the NaN and Inf in weight and gradient of every shard: int64 [parameters, 4], CPU.

    Reads every element once and waits for the device once: called only when something is known to
    be wrong.
    """
    found: list[torch.Tensor] = []
    rows: list[tuple[int, int]] = []
    readers: tuple[tuple[int, Callable[[Shard], torch.Tensor | None]], ...] = (
        (0, lambda shard: shard.weight()),
        (2, lambda shard: shard.grad()),
    )
    for i, shard in enumerate(shards):
        for column, read in readers:
            tensor = read(shard)
            if tensor is None:
                continue
            size = PART_ELEMENTS if tensor.is_cpu else DEVICE_PART_ELEMENTS
            for part in parts(tensor, size):
                found += (torch.isnan(part).sum(), torch.isinf(part).sum())
                rows += ((i, column), (i, column + 1))
    counts = torch.zeros((len(shards), 4), dtype=torch.int64)
    if found:
        where = torch.tensor(rows)
        numbers = torch.stack(found).cpu()  # the only wait
        counts.index_put_((where[:, 0], where[:, 1]), numbers, accumulate=True)
    return counts

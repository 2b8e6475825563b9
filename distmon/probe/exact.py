"""Weight and gradient columns over every element, piece by piece, without a copy of any tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from csrc_triton.row_layout import MAX, SUM
from distmon.layout import Shard
from distmon.probe.log_bins import log_bin
from distmon.probe.rows import Rows

# A piece and its temporaries stay in a core's cache.
PIECE_ELEMENTS = 1 << 17


class ExactPass:
    """Replaces the sampled weight and gradient columns by exact ones; updates stay sampled."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    def fill(self, rows: Rows, applied: torch.Tensor) -> None:
        """Overwrite the columns of every parameter held here. `applied` as in `measure`."""
        for i, shard in enumerate(self._shards):
            weight, grad = shard.weight(), shard.grad()
            rows.sums[i, SUM["w_count"]] = weight.numel()
            self._fill_one(rows, i, "w", weight, None)
            if grad is not None:
                rows.sums[i, SUM["g_count"]] = grad.numel() * applied[i]
                self._fill_one(rows, i, "g", grad, applied[i])

    def _fill_one(
        self, rows: Rows, i: int, what: str, tensor: torch.Tensor, applied: torch.Tensor | None
    ) -> None:
        total = torch.zeros(5, dtype=torch.float64, device=tensor.device)
        highest = torch.full((2,), -torch.inf, device=tensor.device)
        bins = rows.bins[i] if rows.bins is not None and what == "g" else None
        if bins is not None:
            bins.zero_()
        for piece in pieces(tensor):
            x = piece.float() if piece.dtype in (torch.bfloat16, torch.float16) else piece
            nan, finite = torch.isnan(x), torch.isfinite(x)
            inf = x.numel() - finite.sum() - nan.sum()
            clean = torch.nan_to_num(x, 0.0, 0.0, 0.0)
            square = torch.linalg.vector_norm(clean, dtype=torch.float64).square()
            zeros = (clean == 0).sum() - nan.sum() - inf
            total += torch.stack([clean.sum(dtype=torch.float64), square, nan.sum(), inf, zeros])
            low = clean.masked_fill(~finite, torch.inf).amin()
            high = clean.masked_fill(~finite, -torch.inf).amax()
            highest = torch.maximum(highest, torch.stack([high, -low]).float())
            if bins is not None:
                where = log_bin(clean)
                weights = finite.to(torch.float64)
                bins.scatter_add_(0, where, weights)
        if applied is not None:
            total = total * applied
            highest = torch.where(applied > 0, highest, -torch.inf)
            if bins is not None:
                bins.mul_(applied)
        first = SUM[f"{what}_sq0"]
        rows.sums[i, first : first + 8] = 0
        rows.sums[i, first] = total[1]
        rows.sums[i, SUM[f"{what}_sum"]] = total[0]
        rows.sums[i, SUM[f"{what}_nan"]] = total[2]
        rows.sums[i, SUM[f"{what}_inf"]] = total[3]
        if what == "g":
            rows.sums[i, SUM["g_zero"]] = total[4]
            rows.maxima[i, MAX["g_max"] : MAX["g_negmin"] + 1] = highest
        else:
            rows.maxima[i, MAX["w_absmax"]] = highest.amax()


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat pieces of a tensor that together hold every element once, without copying it."""
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.detach().view(-1), PIECE_ELEMENTS)
    elif tensor.dim() == 1 or tensor[0].numel() <= PIECE_ELEMENTS:
        # Order does not matter to sums, so slices along the first dimension may be copied singly.
        rows = max(1, PIECE_ELEMENTS // max(1, tensor[0].numel()))
        for part in torch.split(tensor.detach(), rows):
            yield part.reshape(-1)
    else:
        for part in tensor.detach():
            yield from pieces(part)


def nonfinite_counts(shards: Sequence[Shard]) -> torch.Tensor:
    """NaN and Inf in weight and gradient of every shard: int64 [parameters, 4], on the CPU.

    Reads every element once and waits for the result: called only when something is known to be
    wrong.
    """
    counts = torch.zeros((len(shards), 4), dtype=torch.int64)
    readers: tuple[tuple[int, Callable[[Shard], torch.Tensor | None]], ...] = (
        (0, lambda shard: shard.weight()),
        (2, lambda shard: shard.grad()),
    )
    for i, shard in enumerate(shards):
        for column, read in readers:
            tensor = read(shard)
            if tensor is None:
                continue
            for piece in pieces(tensor):
                counts[i, column] += torch.isnan(piece).sum().cpu()
                counts[i, column + 1] += torch.isinf(piece).sum().cpu()
    return counts

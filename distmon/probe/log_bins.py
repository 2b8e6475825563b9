"""The signed, log-spaced bins of the gradient histogram."""

from __future__ import annotations

import torch

from csrc_triton.row_layout import BINS, HALF_BINS, KEY_BASE, KEY_SHIFT, count_bits


def log_bin(values: torch.Tensor) -> torch.Tensor:
    """The bin of each finite value, int64; bins are in value order."""
    bits = values.float().view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).bitwise_right_shift_(KEY_SHIFT)
    magnitude.sub_(KEY_BASE).clamp_(0, HALF_BINS - 1)
    # With the sign bit spread over the word, xor turns m into -1 - m for negative values.
    return magnitude.bitwise_xor_(bits >> 31).add_(HALF_BINS).long()


def histogram_by_row(values: torch.Tensor) -> torch.Tensor:
    """Counts of each row's values, float64 [rows, BINS]."""
    bins = log_bin(values)
    counts = torch.zeros((len(values), BINS), dtype=torch.int32, device=values.device)
    one = torch.ones((), dtype=torch.int32, device=values.device)
    return counts.scatter_add_(1, bins, one.expand_as(bins)).double()


def pack_bins(counts: torch.Tensor, words: int) -> torch.Tensor:
    """Pack float64 counts [..., BINS] into float64 [..., words]; see `row_layout`."""
    places = counts.view(*counts.shape[:-1], BINS // words, words)
    sizes = torch.arange(BINS // words, dtype=torch.float64, device=counts.device)
    return (places * torch.exp2(sizes * count_bits(words)).unsqueeze(-1)).sum(-2)

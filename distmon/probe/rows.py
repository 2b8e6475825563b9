"""The tables that a probe fills: views into the buffers that are reduced over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """One row per parameter, in table order, on the plan's device.

    Parameters that are not held on this rank keep zeros in `sums` and `bins` and -inf in `maxima`.
    """

    sums: torch.Tensor
    """float64 [parameters, SUM_COLUMNS]"""
    maxima: torch.Tensor
    """float32 [parameters, MAX_COLUMNS]"""
    bins: torch.Tensor | None
    """float64 [parameters, BINS], or None when percentiles are off."""

    def clear(self) -> None:
        """Make every row that of a parameter that is not here."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)
        if self.bins is not None:
            self.bins.zero_()

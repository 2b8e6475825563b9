"""The tables that a probe fills: views into the buffers that are reduced over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray


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
    """float64 [parameters, words]: packed counts of BINS bins; None when percentiles are off."""

    @cached_property
    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float64] | None]:
        """The three tables, where they are on the host."""
        bins = None if self.bins is None else self.bins.numpy()
        return self.sums.numpy(), self.maxima.numpy(), bins

    @classmethod
    def like(cls, other: Rows) -> Rows:
        """Uninitialised tables of the same size."""
        bins = None if other.bins is None else torch.empty_like(other.bins)
        return cls(torch.empty_like(other.sums), torch.empty_like(other.maxima), bins)

    def take_from(self, other: Rows, rows: torch.Tensor) -> None:
        """Copy the given rows (int64, on the device)."""
        self.sums.index_copy_(0, rows, other.sums.index_select(0, rows))
        self.maxima.index_copy_(0, rows, other.maxima.index_select(0, rows))
        if self.bins is not None and other.bins is not None:
            self.bins.index_copy_(0, rows, other.bins.index_select(0, rows))

    def clear(self) -> None:
        """Make every row that of a parameter that is not here."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)
        if self.bins is not None:
            self.bins.zero_()

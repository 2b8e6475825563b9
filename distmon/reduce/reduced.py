"""The reduced numbers of an observation, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import SUM

Floats = NDArray[np.float64]
any_nonzero: Final = np.logical_or.reduce
"""Called with `axis=None`. `np.any` and `np.count_nonzero` are functions in Python around it."""
# Columns that count NaN and Inf; neighbors, so that no copy is made of them.
_OF_WEIGHTS: Final = slice(SUM["w_nan"], SUM["w_inf"] + 1)
_OF_GRADIENTS: Final = slice(SUM["g_nan"], SUM["g_inf"] + 1)


def sample_has_nonfinite(sums: Floats) -> bool:
    """Return whether any sampled weight or gradient is NaN or Inf, from the rows of sums."""
    return bool(
        any_nonzero(sums[:, _OF_WEIGHTS], axis=None)
        or any_nonzero(sums[:, _OF_GRADIENTS], axis=None)
    )


@dataclass(frozen=True)
class Reduced:
    """The result of the two collectives on the host. Its arrays are its own, never buffer views."""

    sums: Floats
    maxima: Floats
    bins: NDArray[np.floating[Any]] | None
    """float32, which is exact up to 16 million elements in a bin."""
    ranks: Mapping[str, Floats]
    """Fields of the rank slots: `ranks[field][rank]`."""
    errors: Mapping[int, str]
    """Error text by rank that failed to observe."""
    partial_gradients: Floats
    """Sums of the partial gradients, for `PartialGradients.fill`."""

    @property
    def sample_has_nonfinite(self) -> bool:
        """Whether any sampled weight or gradient is NaN or Inf."""
        return sample_has_nonfinite(self.sums)

"""The reduced numbers of an observation, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import SUM

Floats = NDArray[np.float64]
NONFINITE: Final = [SUM[f"{what}_{kind}"] for what in "wg" for kind in ("nan", "inf")]
"""Columns that count NaN and Inf."""


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
        return bool(self.sums[:, NONFINITE].any())

"""Derive the gradient gain of every block from reduced sums of squares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distmon.collect.gradient_gain.block_table import COLUMNS
from distmon.record.record import GainTable

_ENOUGH = 3
"""Observations before a drift is derived: single steps differ by chance."""


def gain_table(names: Sequence[str], sums: NDArray[np.float64]) -> GainTable | None:
    """Return the norms over the global batch; None when no block was measured.

    Each rank's loss is the mean over its part of the batch, so the gradient of the mean over all
    parts is that of a rank divided by the ranks. `sums` is the flat buffer after the reduction.
    """
    columns = dict(zip(COLUMNS, sums.reshape(-1, len(COLUMNS)).T, strict=True))
    entered, left = columns["input_count"], columns["output_count"]
    measured = left > 0
    if not measured.any():
        return None
    # Otherwise the two belong to different passes, or there is no gradient before this block.
    both = measured & (entered == left)
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = {
            side: np.sqrt(columns[f"{side}_square"]) / columns["holders"]
            for side in ("input", "output")
        }
    return GainTable(
        blocks=tuple(names),
        input_norm=np.where(both, norms["input"], np.nan),
        output_norm=np.where(measured, norms["output"], np.nan),
    )


class GainWindow:
    """The mean gains of the last observations: their average and how they drift."""

    def __init__(self, window: int, longest_chain: int) -> None:
        self._window = window
        self._longest_chain = longest_chain
        self.values: list[float] = []
        """Of the last observations, oldest first; what a checkpoint keeps."""

    def restore(self, values: Sequence[float]) -> None:
        """Continue from the `values` of another window, which may have been longer."""
        self.values = [float(value) for value in values][-self._window :]

    def metrics(self, gain: GainTable | None) -> dict[str, float]:
        """Add one observation and return its metrics; none when nothing was measured."""
        if gain is None:
            return {}
        gains = [*gain.inner_gains.values()]
        if not gains:
            return {}
        mean = float(np.mean(gains))
        self.restore([*self.values, mean])
        oldest = self.values[0]
        with np.errstate(over="ignore"):
            amplification = float(np.float64(mean) ** self._longest_chain)
        found = {
            "gradient_monitor/mean_gain": mean,
            "gradient_monitor/mean_gain_ma": sum(self.values) / len(self.values),
            "gradient_monitor/amplification": amplification,
        }
        if len(self.values) >= min(_ENOUGH, self._window) and oldest > 0:
            found["gradient_monitor/mean_gain_drift"] = (mean - oldest) / oldest
        return found

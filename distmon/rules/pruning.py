"""Weights that the trainer prunes: what the loss does then has a known cause."""

from __future__ import annotations

from math import inf, isfinite
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import Record
from distmon.rules.base import Memory, metric
from distmon.rules.layer_stacks import fingerprint
from distmon.rules.second_sign import LARGE_UPDATE, NOISE

SMALLER: Final = 0.97
"""Share of its norm that a matrix keeps which loses some of its elements."""
SAME: Final = 0.1
"""Relative change of the largest element, at most: pruning takes the small ones."""
BEYOND: Final = 2.0
"""Times what its updates explain."""


def pruned_matrices(record: Record, memory: Memory) -> NDArray[np.bool_]:
    """Return the matrices that lost only small elements: the norm fell, the largest one stayed.

    Weights that decay, are drawn anew, loaded or averaged have another largest element, too; and
    large updates move any of them. Call once for each record: sizes are kept in `memory`.
    """
    c, names = record.params.columns, fingerprint(record.params.names)
    now = np.nan_to_num(np.array([c["weight_norm"], c["weight_absmax"]]))
    then = memory.get("sizes") if memory.get("sizes_of") == names else None
    steps = record.step - memory.get("sizes_at", 0)
    memory["sizes_of"], memory["sizes"], memory["sizes_at"] = names, now.tolist(), record.step
    if then is None:
        return np.zeros(len(record.params), dtype=bool)
    norm, largest = np.array(then)
    with np.errstate(invalid="ignore"):
        # What is left is orthogonal to what was taken away.
        taken = np.sqrt(np.clip(norm**2 - now[0] ** 2, 0.0, None))
        explained = np.nan_to_num(steps * c["update_norm"])
    fewer = (now[0] < SMALLER * norm) & (taken > BEYOND * explained) & (c["ndim"] >= 2)
    return np.asarray(fewer & (np.abs(now[1] - largest) <= SAME * largest))


def pruning_explains(record: Record, memory: Memory) -> bool:
    """Return whether weights were pruned since the loss was at its best."""
    pruned, history = bool(pruned_matrices(record, memory).any()), record.history
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    height = median(losses) - history.best if losses and history.best is not None else inf
    recovered = height <= NOISE * history.noise
    large = (metric(record, "monitor/update_ratio_median") or 0.0) > LARGE_UPDATE
    memory["pruned"] = not large and (pruned or (bool(memory.get("pruned")) and not recovered))
    return bool(memory["pruned"])

"""Weights that the trainer prunes: what the loss does then has a known cause."""

from __future__ import annotations

from dataclasses import dataclass
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
UNTOUCHED: Final = 0.5
"""Times the relative fall of the norm that the largest element may fall by."""
BEYOND: Final = 2.0
"""Times what its updates explain."""
TWICE: Final = 2
"""Observations with pruned weights that are no coincidence."""


@dataclass(frozen=True)
class Pruned:
    """The matrices that lost only small elements since the record before."""

    matrices: NDArray[np.bool_]
    certain: bool = False
    """Whether updates cannot have done it."""


def pruned(record: Record) -> Pruned:
    """Return the matrices whose norm fell and whose largest element did not.

    Weights that decay, are drawn anew, loaded or averaged have another largest element, too.
    """
    history = record.history
    return history.once("pruned", lambda: _compare(record, history.shared))


def _compare(record: Record, memory: Memory) -> Pruned:
    c, names = record.params.columns, fingerprint(record.params.names)
    now = np.nan_to_num(np.array([c["weight_norm"], c["weight_absmax"], c["update_norm"]]))
    then = memory.get("sizes") if memory.get("sizes_of") == names else None
    steps = record.step - memory.get("sizes_at", 0)
    memory["sizes_of"], memory["sizes"], memory["sizes_at"] = names, now.tolist(), record.step
    if then is None:
        return Pruned(np.zeros(len(record.params), dtype=bool))
    norm, largest, update = np.array(then)
    explained = steps * np.maximum(now[2], update)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fell, peak_fell = 1 - now[0] / norm, 1 - now[1] / largest
        # What is left is orthogonal to what was taken away.
        taken = np.sqrt(np.clip(norm**2 - now[0] ** 2, 0.0, None))
        matrices = (fell > 1 - SMALLER) & (peak_fell < UNTOUCHED * fell) & (c["ndim"] >= 2)
    matrices &= taken > BEYOND * explained
    # Updates change a norm by their own norms at most.
    return Pruned(matrices, bool((matrices & (norm - now[0] > explained)).any()))


def pruning_explains(record: Record, memory: Memory) -> bool:
    """Return whether weights were pruned since the loss was at its best."""
    found, history = pruned(record), record.history
    losses = [loss for loss in record.losses.values() if isfinite(loss)]
    height = median(losses) - history.best if losses and history.best is not None else inf
    large = (metric(record, "monitor/update_ratio_median") or 0.0) > LARGE_UPDATE
    if large or height <= NOISE * history.noise:
        memory["times"] = 0
    if found.matrices.any() and not large:
        memory["times"] = TWICE if found.certain else memory.get("times", 0) + 1
    return bool(memory.get("times", 0) >= TWICE)

"""Whether error bars cover the truth of all elements, and not only that of the sampled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np

from distmon.record.record import Record
from distmon.verify.expected import Expected
from distmon.verify.parallelisms import Limits

NORMS: Final = {"weight_norm": "weights", "grad_norm": "gradients", "update_norm": "updates"}
"""The limit of each norm."""
STANDARD_ERRORS: Final = 2.0
GOAL: Final = 0.93
"""Share of truths within 2 standard errors."""
_DEVIATIONS: Final = 3.0


@dataclass(frozen=True)
class Coverage:
    """How many norms over all elements lie within 2 standard errors of their estimate."""

    covered: int
    estimated: int
    """Norms with an error bar; those that are exact or unknown have none."""
    samples: int
    """Different samples among them: each is observed several times."""
    wrong: tuple[str, ...]
    """Norms that are reported without an error bar and are not exact, one sentence each."""

    @property
    def problems(self) -> list[str]:
        """Return what is wrong. A few samples may by chance cover less than the goal."""
        found = [*self.wrong]
        chance = _DEVIATIONS * sqrt(GOAL * (1 - GOAL) / max(self.samples, 1))
        if self.covered < (GOAL - chance) * self.estimated:
            found.append(
                f"only {self.covered} of {self.estimated} estimated norms are within "
                f"{STANDARD_ERRORS:.0f} standard errors of the norm over all elements"
            )
        return found


def coverage(
    expected: Sequence[Expected], records: Sequence[Record], order: Sequence[int], limits: Limits
) -> Coverage:
    """Compare the norms of records with those over all elements of the unsharded model."""
    covered = estimated = 0
    samples: set[tuple[str, int]] = set()
    wrong: list[str] = []
    for truth, record in zip(expected, records, strict=True):
        for column, limit in NORMS.items():
            norm, found, stderr = (
                values[name][[*rows]]
                for values, name, rows in (
                    (truth.whole, column, range(len(truth.names))),
                    (record.params.columns, column, order),
                    (record.params.columns, f"{column}_stderr", order),
                )
            )
            compared = np.isfinite(norm) & np.isfinite(found) & np.isfinite(stderr)
            if column != "weight_norm":
                compared &= ~truth.skipped(limits)
            with np.errstate(invalid="ignore"):
                within = np.abs(found - norm) <= STANDARD_ERRORS * stderr + (
                    getattr(limits, limit) * norm
                )
            bars = compared & (stderr > 0)
            covered += int((bars & within).sum())
            estimated += int(bars.sum())
            samples |= {(column, int(i)) for i in np.flatnonzero(bars)}
            wrong += [
                f"step {truth.step}: {column} of {truth.names[i]} is {found[i]:.6g} with no error "
                f"bar, but {norm[i]:.6g} over all elements"
                for i in np.flatnonzero(compared & (stderr == 0) & ~within)
            ]
    return Coverage(covered, estimated, len(samples), tuple(wrong))

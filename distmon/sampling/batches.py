"""Samples that can be laid out together: the same design, of shards of the same region.

Large models have many parameters of few shapes. Per parameter a dozen numpy calls take 100 us; for
a batch of them the calls take as long as the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from distmon.layout import Shard
from distmon.layout.shard import Region
from distmon.sampling.sample import Design, DrawnRuns, Indices, Sample, draw

MOST_ELEMENTS: Final = 1 << 20
"""Elements in a batch: temporary arrays of 8 MB each."""


@dataclass(frozen=True)
class Batch:
    """Samples of one design, of shards of one region."""

    rows: Indices
    """Indices of the parameters."""
    samples: Sequence[Sample]
    region: Region

    @property
    def sample(self) -> Sample:
        """One of the samples, for what they have in common."""
        return self.samples[0]

    def draw(self) -> DrawnRuns:
        """Return the runs that may lie in the region."""
        return draw(self.samples, *self.region.bounds(self.sample.numel))


def batches(shards: Sequence[Shard], samples: Mapping[int, Sample]) -> Iterator[Batch]:
    """Yield the samples, given by parameter, of which this rank may hold something."""
    together: dict[tuple[Design, Region], list[int]] = {}
    for i, sample in samples.items():
        together.setdefault((sample.design, shards[i].region), []).append(i)
    for (design, region), rows in together.items():
        begin, end = region.bounds(design[0])
        if begin >= end:
            continue
        first = samples[rows[0]]
        runs = draw([first], begin, end).starts.size
        size = max(1, MOST_ELEMENTS // max(1, runs * first.run))
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            yield Batch(np.array(part), [samples[i] for i in part], region)

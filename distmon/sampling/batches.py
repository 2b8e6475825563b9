"""Samples that can be laid out together: the same design, of shards of the same region.

Large models have many parameters of few shapes. Per parameter a dozen numpy calls take 100 us; for
a batch of them the calls take as long as the elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from distmon.layout import Shard
from distmon.layout.shard import Region
from distmon.sampling.sample import Design, DrawnRuns, Indices, Sample, draw
from distmon.sampling.samples import Samples

MOST_ELEMENTS: Final = 1 << 17
"""Elements in a batch: a dozen temporary arrays of 1 MB each."""


@dataclass(frozen=True)
class Batch:
    """Samples of one design, of shards of one region."""

    rows: Indices
    """Indices of the parameters."""
    names: Sequence[str]
    sample: Sample
    """One that is like all of them but for its name."""
    region: Region

    def draw(self) -> DrawnRuns:
        """Return the runs that may lie in the region."""
        return draw(self.sample, self.names, *self.region.bounds(self.sample.numel))


def batches(shards: Sequence[Shard], samples: Samples, rows: Iterable[int]) -> Iterator[Batch]:
    """Yield the samples of the parameters `rows` of which this rank may hold something."""
    together: dict[tuple[Design, Region], list[int]] = {}
    for i in rows:
        together.setdefault((samples.designs[i].design, shards[i].region), []).append(i)
    for (design, region), alike in together.items():
        begin, end = region.bounds(design[0])
        if begin >= end:
            continue
        like = samples.designs[alike[0]]
        runs = draw(like, [""], begin, end).starts.size
        size = max(1, MOST_ELEMENTS // max(1, runs * like.run))
        for at in range(0, len(alike), size):
            part = alike[at : at + size]
            yield Batch(np.array(part), [samples.names[i] for i in part], like, region)

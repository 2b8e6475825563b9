"""Numbers of samples that are known before anything is read. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS
from distmon.sampling.sample import Indices, count_elements, group_shares
from distmon.sampling.samples import Samples


@dataclass(frozen=True)
class GroupShares:
    """Share of each sample that falls into each of its GROUPS.

    Samples of one design have the same shares, unless it depends on chance: they are kept once.
    """

    rows: NDArray[np.float64]
    """[different ones, GROUPS]"""
    which: NDArray[np.int32]
    """[parameters]: index into `rows`."""

    @property
    def table(self) -> NDArray[np.float64]:
        """[parameters, GROUPS]"""
        return self.rows.take(self.which, axis=0)


@dataclass(frozen=True)
class SampleNumbers:
    """What is known of samples before anything is read, by parameter."""

    count: Indices
    """Elements in the sample."""
    expansion: NDArray[np.float64]
    whole: NDArray[np.bool_]
    group_shares: GroupShares
    cluster: NDArray[np.float64]
    """Elements that chance brings into the sample together: a run, unless every row has one."""

    @classmethod
    def of(cls, samples: Samples) -> SampleNumbers:
        """Tabulate the samples."""
        count = np.zeros(len(samples), dtype=np.int64)
        expansion = np.zeros(len(samples))
        whole = np.zeros(len(samples), dtype=bool)
        shares, different = [np.zeros((0, GROUPS))], 0
        which = np.zeros(len(samples), dtype=np.int32)
        cluster = np.ones(len(samples))
        for rows in samples.by_design().values():
            like, names = samples.designs[rows[0]], [samples.names[i] for i in rows]
            count[rows] = count_elements(like, names)
            expansion[rows], whole[rows] = like.expansion, like.whole
            shares.append(group_shares(like, names))
            which[rows] = different + np.arange(len(shares[-1]))
            different += len(shares[-1])
            cluster[rows] = 1 if like.whole or like.by_lane else like.run
        return cls(count, expansion, whole, GroupShares(np.concatenate(shares), which), cluster)

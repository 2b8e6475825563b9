"""Numbers of samples that are known before anything is read. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS
from distmon.sampling.sample import Design, Indices, Sample, count_elements, group_shares


@dataclass(frozen=True)
class SampleNumbers:
    """What is known of samples before anything is read, by parameter."""

    count: Indices
    """Elements in the sample."""
    expansion: NDArray[np.float64]
    whole: NDArray[np.bool_]
    group_share: NDArray[np.float64]
    """[parameters, GROUPS]: share of the sample that falls into each group."""
    cluster: Indices
    """Elements that chance brings into the sample together: a run, unless every row has one."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleNumbers:
        """Tabulate the samples."""
        together: dict[Design, list[int]] = {}
        for i, sample in enumerate(samples):
            together.setdefault(sample.design, []).append(i)
        count = np.zeros(len(samples), dtype=np.int64)
        expansion = np.zeros(len(samples))
        whole = np.zeros(len(samples), dtype=bool)
        share = np.zeros((len(samples), GROUPS))
        cluster = np.ones(len(samples), dtype=np.int64)
        for rows in together.values():
            some = [samples[i] for i in rows]
            count[rows] = count_elements(some)
            expansion[rows], whole[rows] = some[0].expansion, some[0].whole
            share[rows] = group_shares(some)
            cluster[rows] = 1 if some[0].whole or some[0].by_lane else some[0].run
        return cls(count, expansion, whole, share, cluster)

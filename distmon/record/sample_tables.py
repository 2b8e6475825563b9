"""What is known of the sample of every parameter before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import Column
from distmon.sampling.sample_numbers import GroupShares, SampleNumbers

if TYPE_CHECKING:
    from distmon.sampling.plan import SamplePlan


@dataclass(frozen=True)
class SampleTable:
    """What is known of the samples of one quantity before anything is measured, by parameter."""

    slots: Column
    """Elements in the sample."""
    group_shares: GroupShares
    """Of no use where all is read."""
    expansion: Column
    """Sum over the parameter / expected sum over the sample."""
    unseen: Column
    """Share of the parameter that is not read; 0 when it is read whole."""
    cluster: Column
    """Elements that are in the sample together by chance."""

    @classmethod
    def of(cls, numbers: SampleNumbers, numel: Column) -> SampleTable:
        """Tabulate the samples."""
        slots = numbers.count.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            unseen = np.where(numbers.whole, 0.0, 1 - slots / numel)
        return cls(slots, numbers.group_shares, numbers.expansion, unseen, numbers.cluster)

    @classmethod
    def whole(cls, numbers: SampleNumbers, numel: Column) -> SampleTable:
        """Tabulate what is read whole whatever the samples."""
        nothing = np.zeros(len(numel))
        return cls(numel, numbers.group_shares, nothing + 1, nothing, numbers.cluster)


@dataclass(frozen=True)
class Sampling:
    """What is known of every parameter before anything is measured."""

    names: tuple[str, ...]
    tables: Mapping[str, SampleTable]
    """Of weights "w", gradients "g" and updates "u"."""
    numel: Column
    ndim: Column
    trainable: NDArray[np.bool_]
    """Whether it was to learn when the monitor was attached."""

    @classmethod
    def describe(cls, plan: SamplePlan, ndim: Sequence[int], trainable: Sequence[bool]) -> Sampling:
        """Tabulate what `plan` reads."""
        numel = np.array([like.numel for like in plan.samples.designs], dtype=np.float64)
        sampled = SampleTable.of(plan.numbers, numel)
        whole = plan.reading.whole_weights
        tables = {
            "w": SampleTable.whole(plan.numbers, numel) if whole else sampled,
            "g": SampleTable.of(plan.gradient_numbers, numel),
            "u": sampled,
        }
        return cls(
            names=plan.names,
            tables=tables,
            numel=numel,
            ndim=np.array(ndim, dtype=np.float64),
            trainable=np.array(trainable, dtype=bool),
        )

    @property
    def unseen(self) -> Column:
        """Share of each parameter that its sample of weights and updates leaves out."""
        return self.tables["u"].unseen

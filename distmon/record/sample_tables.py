"""What is known of the sample of every parameter before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS
from distmon.record.record import Column
from distmon.sampling.sample_numbers import SampleNumbers

if TYPE_CHECKING:
    from distmon.sampling.plan import SamplePlan


@dataclass(frozen=True)
class SampleTable:
    """What is known of the samples of one quantity before anything is measured, by parameter."""

    slots: Column
    """Elements in the sample."""
    group_share: NDArray[np.float64]
    """[parameters, GROUPS]: share of the sample that falls into each group."""
    expansion: Column
    """Sum over the parameter / expected sum over the sample."""
    unseen: Column
    """Share of the parameter that is not read; 0 when it is read whole."""
    cluster: Column
    """Elements that are in the sample together by chance."""

    @classmethod
    def of(
        cls, numbers: SampleNumbers, numel: Column, whole: NDArray[np.bool_] | bool = False
    ) -> SampleTable:
        """Tabulate the samples; `whole` are replaced by everything."""
        everything = numbers.whole | whole
        slots = np.where(everything, numel, numbers.count)
        share = np.where(everything[:, None], 1 / GROUPS, numbers.group_share)
        with np.errstate(divide="ignore", invalid="ignore"):
            unseen = np.where(everything, 0.0, 1 - slots / numel)
        expansion = np.where(everything, 1.0, numbers.expansion)
        return cls(slots, share, expansion, unseen, numbers.cluster.astype(np.float64))


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
        numel = np.array([sample.numel for sample in plan.samples], dtype=np.float64)
        tables = {
            "w": SampleTable.of(plan.numbers, numel, plan.reading.whole_weights),
            "g": SampleTable.of(plan.gradient_numbers, numel),
            "u": SampleTable.of(plan.numbers, numel),
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

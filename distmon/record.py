"""The record: what one observation found, as plain numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import GRAD_PERCENTILES, PARAM_METRICS
from distmon.probe.log_bins import percentiles

Column = NDArray[np.float64]


@dataclass(frozen=True)
class ParamTable:
    """Statistics by parameter: `columns[metric][row]`, NaN where nothing was measured."""

    names: tuple[str, ...]
    columns: Mapping[str, Column]
    """The PARAM_METRICS."""
    grad_histogram: NDArray[np.floating[Any]] | None = None
    """Counts by parameter and signed log bin (`csrc_triton.row_layout`); None when off."""

    @cached_property
    def percentiles(self) -> Mapping[str, Column]:
        """The PERCENTILE_METRICS, computed when first asked for: only sinks need them."""
        if self.grad_histogram is None:
            return {}
        values = percentiles(
            self.grad_histogram,
            self.columns["grad_min"],
            self.columns["grad_max"],
            GRAD_PERCENTILES,
        )
        return {f"grad_p{q}": v for q, v in zip(GRAD_PERCENTILES, values, strict=True)}

    @classmethod
    def empty(cls) -> Self:
        """A table of no parameters, with all columns."""
        return cls((), {metric.name: np.zeros(0) for metric in PARAM_METRICS})

    def __len__(self) -> int:
        return len(self.names)

    def row(self, name: str) -> dict[str, float]:
        """All statistics of one parameter; KeyError when there is none of that name."""
        if name not in self.names:
            raise KeyError(name)
        at = self.names.index(name)
        return {metric: float(column[at]) for metric, column in self.columns.items()}


@dataclass(frozen=True)
class NonFinite:
    """Where NaN and Inf were found when they were first seen."""

    step: int
    signal: str
    """What showed it: `loss`, `gradient norm` or `sample`."""
    places: tuple[NonFinitePlace, ...]
    """In layer order; at most 64."""
    param_count: int
    """How many parameters held one, also those beyond the listed places."""


@dataclass(frozen=True)
class NonFinitePlace:
    """One parameter on one rank."""

    param: str
    rank: int
    weight_nan: int
    weight_inf: int
    grad_nan: int
    grad_inf: int


@dataclass(frozen=True)
class Desync:
    """Ranks that should hold equal values and do not."""

    ranks: tuple[int, ...]
    """Those that left the majority; with a tie, those that differ from the lowest rank."""
    reference: int
    """A rank that agrees with the majority."""
    params: tuple[str, ...]
    tie: bool


@dataclass(frozen=True)
class FlowTable:
    """How the gradient changes on its way back through each block, in layer order."""

    blocks: tuple[str, ...]
    input_norm: Column
    """Norm of dL/d(input of the block) over the global batch; NaN where nothing was measured."""
    output_norm: Column
    """Norm of dL/d(output of the block)."""

    @property
    def gain(self) -> Column:
        """Above 1 the gradient grows on its way back; NaN where nothing came in."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.output_norm > 0, self.input_norm / self.output_norm, np.nan)

    @property
    def inner_gains(self) -> dict[str, float]:
        """The gains that tell of depth: without the first block of every stack, if others remain.

        The first block normalises the embedding. While that is small, as it is at the start, its
        gain is large: about 60 in a small language model that trains well.
        """
        gains = {b: float(g) for b, g in zip(self.blocks, self.gain, strict=True) if isfinite(g)}
        first: dict[str, str] = {}
        for block in self.blocks:
            first.setdefault(block.rpartition(".")[0], block)
        return {b: g for b, g in gains.items() if b not in first.values()} or gains


@dataclass(frozen=True)
class Evaluation:
    """One validation of the model, as it was told to `Monitor.evaluated`, mean over ranks."""

    number: int
    """1 for the first of the run."""
    step: int
    epoch: float | None
    train_loss: float | None
    val_loss: float
    improvement: float | None
    """(previous - now) / previous validation loss; None without a previous one."""
    train_improvement: float | None
    gap: float | None
    """(validation - training) / training loss."""
    unchanged: int
    """Evaluations in a row, up to this one, whose validation loss changed by less than 1%."""


@dataclass(frozen=True)
class Record:
    """The reduced result of one observation. Everything downstream sees this and nothing else."""

    step: int
    time: float
    """Unix seconds, when rank 0 took the observation."""
    world_size: int
    metrics: Mapping[str, float]
    """Tag to value; NaN where a value exists but is not a number; absent when not measured."""
    params: ParamTable
    ranks: Mapping[str, Column]
    """Telemetry by rank: `ranks[metric][rank]`; what no rank knows is absent."""
    hosts: tuple[str, ...] = ()
    """Host name by rank, where they are known."""
    mfu_source: str = ""
    """What `performance/mfu` was computed from, in one line; empty when there is none."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Mean loss over ranks of every step since the last record."""
    loss_ema: Mapping[int, float] = field(default_factory=dict)
    """The moving average after each of those steps."""
    applied: bool = True
    """False when the optimizer skipped this step: gradients and updates are then not measured."""
    flow: FlowTable | None = None
    """None when no block is watched, or the backward pass of this step was not."""
    evaluations: tuple[Evaluation, ...] = ()
    """Those since the last record."""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """Gradient norm of each task's loss on the shared parameters, when it was measured."""
    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    partial: bool = False
    """Made at the end, of what came after the last observation: nothing was measured."""
    faults: tuple[str, ...] = ()
    """What kept a rank from observing, one sentence each."""

    @property
    def has_nonfinite(self) -> bool:
        """Whether anything in this record is NaN or Inf that should not be."""
        counts = (self.metrics.get(f"debug/{kind}_param_count", 0.0) for kind in ("nan", "inf"))
        losses_finite = all(map(isfinite, self.losses.values()))
        return self.nonfinite is not None or any(counts) or not losses_finite

"""The record: the result of one observation as plain numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from distmon.metrics import GRAD_PERCENTILES, PARAM_METRICS
from distmon.probe.percentiles import percentiles
from distmon.record.history import RunHistory
from distmon.record.summary_table import html_table, rich_table
from distmon.reduce.findings import Desync, NonFinite, has_nonfinite

Column = NDArray[np.float64]
NO_UPDATE: Final = 1e-12
"""An update ratio at or below this is no update at all; the default of the rule `frozen`."""


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
        """The PERCENTILE_METRICS, computed at the first access: only sinks need them."""
        if self.grad_histogram is None:
            return {}
        values = percentiles(
            self.grad_histogram,
            self.columns["grad_min"],
            self.columns["grad_max"],
            GRAD_PERCENTILES,
        )
        return {f"grad_p{q}": v for q, v in zip(GRAD_PERCENTILES, values, strict=True)}

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is cached: another thread may be adding to it.
        return ParamTable, (self.names, self.columns, self.grad_histogram)

    @classmethod
    def empty(cls) -> Self:
        """Return a table of no parameters, with all columns."""
        return cls((), {metric.name: np.zeros(0) for metric in PARAM_METRICS})

    def frozen(self, ratio: float = NO_UPDATE) -> NDArray[np.bool_]:
        """Return which parameters should have moved and did not by more than `ratio`."""
        return (self.columns["update_ratio"] <= ratio) & (self.columns["update_expected"] > 0)

    def __len__(self) -> int:
        return len(self.names)

    def row(self, name: str) -> dict[str, float]:
        """Return all statistics of one parameter; KeyError when there is none of that name."""
        if name not in self.names:
            raise KeyError(name)
        at = self.names.index(name)
        return {metric: float(column[at]) for metric, column in self.columns.items()}


@dataclass(frozen=True)
class GainTable:
    """Gradient norms at both ends of each block, in layer order."""

    blocks: tuple[str, ...]
    input_norm: Column
    """Norm of dL/d(input of the block) over the global batch; NaN where nothing was measured."""
    output_norm: Column
    """Norm of dL/d(output of the block)."""

    @property
    def gain(self) -> Column:
        """Input norm over output norm: above 1 the gradient grows; NaN without a gradient."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.output_norm > 0, self.input_norm / self.output_norm, np.nan)

    @property
    def inner_gains(self) -> dict[str, float]:
        """The gains without that of the first block of every stack, if others remain.

        The first block normalizes the embedding. While the embedding is small, as it is at the
        start, the gain is large: about 60 in a small language model that trains well.
        """
        gains = {b: float(g) for b, g in zip(self.blocks, self.gain, strict=True) if isfinite(g)}
        first: dict[str, str] = {}
        for block in self.blocks:
            first.setdefault(block.rpartition(".")[0], block)
        return {b: g for b, g in gains.items() if b not in first.values()} or gains


@dataclass(frozen=True)
class InsideTable:
    """Statistics of one kind inside the model: `columns[metric][row]`, NaN where not measured."""

    names: tuple[str, ...]
    """Modules, routers or parameters, in layer order; those that were measured."""
    columns: Mapping[str, Column]
    """The INSIDE_METRICS of this kind."""

    def row(self, name: str) -> dict[str, float]:
        """Return all statistics of one row; KeyError when there is none of that name."""
        if name not in self.names:
            raise KeyError(name)
        at = self.names.index(name)
        return {metric: float(column[at]) for metric, column in self.columns.items()}


@dataclass(frozen=True)
class Evaluation:
    """One validation that the trainer reported to `Monitor.evaluated`, mean over ranks."""

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
    """The reduced result of one observation: all that rules and sinks get."""

    step: int
    time: float
    """Unix seconds, when rank 0 took the observation."""
    world_size: int
    metrics: Mapping[str, float]
    """Tag to value; NaN where a value exists but is not a number; absent when not measured."""
    params: ParamTable
    ranks: Mapping[str, Column]
    """Rank telemetry: `ranks[metric][rank]`; a metric without a value on any rank is absent."""
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
    gradient_gain: GainTable | None = None
    """None when the model has no blocks, or this step was not measured."""
    inside: Mapping[str, InsideTable] = field(default_factory=dict)
    """Activations, attention, experts and spectra, by kind; a kind not measured is absent."""
    evaluations: tuple[Evaluation, ...] = ()
    """Those since the last record."""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """Gradient norm of each task's loss on the shared parameters, when it was measured."""
    nonfinite: NonFinite | None = None
    desync: Desync | None = None
    partial: bool = False
    """Made at the end of a run from what was reported after the last observation."""
    observation: int = 0
    """1 for the first observation of the process; 0 where it is not known."""
    faults: tuple[str, ...] = ()
    """Why a rank failed to observe, one sentence each."""
    history: RunHistory = field(default_factory=RunHistory, compare=False, repr=False)
    """What the records before it said; the rule engine sets it."""

    def __rich__(self) -> Table:
        """Show the metrics as a table."""
        return rich_table(self._title, self._rows)

    def _repr_html_(self) -> str:
        return html_table(self._title, self._rows)

    @property
    def _title(self) -> str:
        return f"record of step {self.step}: {len(self.params)} parameters, {self.world_size} ranks"

    @property
    def _rows(self) -> list[tuple[str, str]]:
        return [(tag, f"{value:.4g}") for tag, value in self.metrics.items()]

    @property
    def has_nonfinite(self) -> bool:
        """Whether anything in this record is NaN or Inf that should not be."""
        counts = (self.metrics.get(f"debug/{kind}_param_count", 0.0) for kind in ("nan", "inf"))
        return has_nonfinite(self.nonfinite, self.losses.values(), any(counts))

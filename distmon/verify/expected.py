"""The reference: statistics of the unsharded model, computed in plain numpy.

It shares only the choice of the sample and the bin edges with the monitor, so the comparison covers
the monitor's tables, probe, collectives and formulas (`docs/sampling.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.metrics import GRAD_PERCENTILES
from distmon.probe.percentiles import percentiles
from distmon.record.record import NO_UPDATE
from distmon.sampling.reading import Reading
from distmon.verify.expected_inside import ExpectedInside, InsideTables
from distmon.verify.expected_row import ExpectedRow, Floats, read_elements
from distmon.verify.parallelisms import PLAIN, Limits, Workload

_NOISE = 1e-12
"""Gradients smaller than this fraction of the largest one are zero but for rounding."""


@dataclass(frozen=True)
class Expected:
    """The values that the observation of one step must find."""

    step: int
    names: tuple[str, ...]
    columns: dict[str, Floats]
    """Values by metric and parameter, as in a record; NaN where nothing is measured."""
    histogram: Floats
    totals: dict[str, float]
    """Metrics over all parameters."""
    losses: dict[int, float]
    """Loss of each step since the previous observation."""
    sampled: NDArray[np.int64]
    """Number of elements in each parameter's sample."""
    gradient_sampled: NDArray[np.int64]
    """Number of elements in the sample of each gradient."""
    loss_eps: float
    """Relative rounding error of the loss in its own dtype."""
    inside: InsideTables
    """What is inside the model over the global batch."""
    noise: NDArray[np.bool_]
    """Parameters whose true gradient is zero, so that gradient and update are rounding noise."""
    whole: dict[str, Floats]
    """Norms over all elements by column and parameter; NaN where there is no gradient."""

    def skipped(self, limits: Limits) -> NDArray[np.bool_]:
        """Return the parameters whose gradient and update are not compared."""
        if limits.unowned_gradients:
            return self.noise
        return np.asarray(self.noise | (self.columns["in_optimizer"] == 0))


def expect(workload: Workload, steps: int, interval: int, reading: Reading) -> list[Expected]:
    """Train the unsharded model and return the reference for every observed step."""
    distributed = PLAIN.build(workload)
    parameters = dict(workload.model.named_parameters())
    groups = [g for optimizer in distributed.optimizers for g in optimizer.param_groups]
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    found: list[Expected] = []
    losses: dict[int, float] = {}
    quiet: set[str] = set()
    samples = read_elements(parameters, reading)
    inside = ExpectedInside(workload.model)
    loss_eps = 0.0
    for step in range(1, steps + 1):
        workload.model.zero_grad()
        with inside.watching():
            loss = distributed.backward(step)
        losses[step] = float("nan") if loss is None else float(loss)
        if loss is not None:
            loss_eps = torch.finfo(loss.dtype).eps
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for optimizer in distributed.optimizers:
            optimizer.step()
        if step % interval:
            continue
        rows = [
            ExpectedRow(samples[name], p, before[name], rates.get(id(p)), name in quiet)
            for name, p in parameters.items()
            if p.is_floating_point()
        ]
        quiet = {row.name for row in rows if row.is_quiet}
        found.append(_tabulate(step, rows, losses, loss_eps, inside.tables()))
        losses = {}
    return found


def _tabulate(
    step: int,
    rows: list[ExpectedRow],
    losses: dict[int, float],
    loss_eps: float,
    inside: InsideTables,
) -> Expected:
    columns = {name: np.array([row.columns[name] for row in rows]) for name in rows[0].columns}
    histogram = np.stack([row.counts for row in rows])
    quantiles = percentiles(histogram, columns["grad_min"], columns["grad_max"], GRAD_PERCENTILES)
    columns |= {f"grad_p{q}": v for q, v in zip(GRAD_PERCENTILES, quantiles, strict=True)}
    largest = np.maximum(columns["grad_max"], -columns["grad_min"])
    with np.errstate(invalid="ignore"):
        noise = (largest > 0) & (largest < _NOISE * np.nanmax(largest, initial=0.0))
    numel = np.array([row.sample.numel for row in rows])
    owned = columns["in_optimizer"] > 0
    totals = {}
    for what, tag, rows_of in (("weight", "param", np.ones_like(owned)), ("grad", "grad", owned)):
        squares = numel * (columns[f"{what}_mean"] ** 2 + columns[f"{what}_std"] ** 2)
        totals[f"monitor/{tag}_norm"] = float(np.sqrt(np.nansum(squares[rows_of])))
    for name, of in (("median", np.median), ("min", np.min), ("max", np.max)):
        ratios = columns["update_ratio"][(columns["requires_grad"] > 0) & owned]
        totals[f"monitor/update_ratio_{name}"] = float(of(ratios))
    still = columns["update_ratio"] <= NO_UPDATE
    totals["monitor/frozen_count"] = float((still & (columns["update_expected"] > 0)).sum())
    return Expected(
        step=step,
        names=tuple(row.name for row in rows),
        columns=columns,
        histogram=histogram,
        totals=totals,
        losses=dict(losses),
        sampled=np.array([row.sample.count for row in rows]),
        gradient_sampled=np.array([row.gradient.count for row in rows]),
        loss_eps=loss_eps,
        inside=inside,
        noise=noise,
        whole={name: np.array([row.whole[name] for row in rows]) for name in rows[0].whole},
    )

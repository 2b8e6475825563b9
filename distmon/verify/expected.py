"""The truth: the unsharded model, read whole, its sampled elements added up in plain numpy.

Nothing of the monitor is used here but the choice of the sample and the edges of the bins, so the
comparison also covers its tables, probe, collectives and formulas (`docs/sampling.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, GROUPS, RUN
from distmon.layout.arrangements import PLAIN, Workload
from distmon.metrics import GRAD_PERCENTILES
from distmon.probe.log_bins import log_bin, percentiles
from distmon.sampling import Sample, choose

Floats = NDArray[np.float64]

SAMPLE_SIZE = 1024
SAMPLE_SEED = 0
EPS = 1e-12
_STILL = 1e-12
"""Update ratio up to which a parameter counts as frozen."""
_NOISE = 1e-12
"""Gradients so much smaller than the largest one are what rounding left of zero."""


@dataclass(frozen=True)
class Expected:
    """What the observation of one step has to find."""

    step: int
    names: tuple[str, ...]
    columns: dict[str, Floats]
    """By metric and parameter, as in a record; NaN where nothing is to be measured."""
    histogram: Floats
    totals: dict[str, float]
    """Metrics over all parameters."""
    losses: dict[int, float]
    """By step since the observation before."""
    sampled: NDArray[np.int64]
    """Elements in each parameter's sample."""
    noise: NDArray[np.bool_]
    """Parameters whose true gradient is zero, so that what is found is rounding, and so is what the
    optimizer makes of it."""


def expect(workload: Workload, steps: int, interval: int) -> list[Expected]:
    """Train the unsharded model and describe every step that will be observed."""
    arranged = PLAIN.build(workload)
    parameters = dict(workload.model.named_parameters())
    groups = [g for optimizer in arranged.optimizers for g in optimizer.param_groups]
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    found: list[Expected] = []
    losses: dict[int, float] = {}
    quiet: set[str] = set()
    for step in range(1, steps + 1):
        workload.model.zero_grad()
        loss = arranged.backward(step)
        losses[step] = float("nan") if loss is None else float(loss)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for optimizer in arranged.optimizers:
            optimizer.step()
        if step % interval:
            continue
        rows = [
            _Row(name, p, before[name], rates.get(id(p)), name in quiet)
            for name, p in parameters.items()
            if p.is_floating_point()
        ]
        quiet = {row.name for row in rows if row.is_quiet}
        found.append(_tabulate(step, rows, losses))
        losses = {}
    return found


class _Row:
    """One parameter at one step."""

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        before: torch.Tensor,
        lr: float | None,
        was_quiet: bool,
    ) -> None:
        self.name = name
        self.sample = choose(name, parameter.numel(), SAMPLE_SIZE, SAMPLE_SEED)
        weight = self._read(parameter)
        update = weight - self._read(before)
        grad = None if parameter.grad is None else self._read(parameter.grad)
        self.counts = np.zeros(BINS)
        if grad is not None:
            bins = log_bin(torch.from_numpy(grad)).numpy()
            self.counts = np.bincount(bins, minlength=BINS).astype(np.float64)
        c = self.columns = {
            **_moments("weight", weight, self.sample),
            "weight_absmax": _largest(np.abs(weight)),
            **_moments("grad", grad, self.sample),
            "grad_max": np.nan if grad is None else _largest(grad),
            "grad_min": np.nan if grad is None else -_largest(-grad),
            "grad_zero_fraction": np.nan if grad is None else float((grad == 0).mean()),
            **_moments("update", update, self.sample),
            "update_absmax": _largest(np.abs(update)),
            **_lost(weight, grad, update, self.sample),
            "lr": np.nan if lr is None else lr,
            "ndim": float(parameter.ndim),
            "requires_grad": float(parameter.requires_grad),
            "in_optimizer": float(lr is not None),
            "has_grad": float(grad is not None),
        }
        for what, values in (("weight", weight), ("grad", grad)):
            for kind, is_kind in (("nan", np.isnan), ("inf", np.isinf)):
                c[f"{what}_{kind}"] = np.nan if values is None else float(is_kind(values).sum())
        c["update_ratio"] = c["update_norm"] / (c["weight_norm"] + EPS)
        still = c["update_ratio"] <= _STILL and parameter.requires_grad and lr != 0
        no_gradient = grad is None or not parameter.grad.any()  # type: ignore[union-attr]
        unseen = not self.sample.whole
        self.is_quiet = still and unseen and c["grad_zero_fraction"] == 1
        # A sample at rest proves nothing about the rest, unless the whole gradient was looked at.
        proven = not unseen or grad is None or lr is None or bool(grad.any())
        c["frozen"] = float(still and (proven or (was_quiet and no_gradient)))

    def _read(self, tensor: torch.Tensor) -> Floats:
        values: Floats = tensor.detach().double().reshape(-1).numpy()[self.sample.indices]
        return values


def _moments(what: str, values: Floats | None, sample: Sample) -> dict[str, float]:
    """Norm with standard error, mean and standard deviation of the whole from its sample."""
    names = [f"{what}_{x}" for x in ("norm", "norm_stderr", "mean", "std")]
    if values is None or not len(values):
        return dict.fromkeys(names, np.nan)
    group = np.arange(len(values)) // RUN % GROUPS
    squares = np.bincount(group, values**2, minlength=GROUPS) * sample.expansion
    square = squares.sum()
    share = np.bincount(group, minlength=GROUPS) / len(values)
    unseen = 0.0 if sample.whole else 1 - len(values) / sample.numel
    spread = ((squares - square * share) ** 2).sum()
    variance = GROUPS / (GROUPS - 1) * spread * unseen
    root = np.sqrt(square)
    norm = root * (1 + variance / square**2 / 8) if square > 0 else 0.0
    stderr = np.sqrt(variance) / (2 * root) if square > 0 else 0.0
    mean = values.sum() * sample.expansion / sample.numel
    std = np.sqrt(max(square / sample.numel - mean**2, 0.0))
    return dict(zip(names, map(float, (norm, stderr, mean, std)), strict=True))


def _lost(weight: Floats, grad: Floats | None, update: Floats, sample: Sample) -> dict[str, float]:
    """Elements that have a gradient and did not move, and how much rounding can have taken."""
    graded = np.zeros(len(weight), dtype=bool) if grad is None else grad != 0
    lost = graded & (weight != 0) & (update == 0)
    half_ulp = 2.0 ** np.floor(np.log2(np.abs(weight[lost]))) * np.finfo(np.float64).eps / 2
    measured = len(weight) > 0
    return {
        "update_lost_fraction": float(lost.sum() / graded.sum()) if graded.any() else np.nan,
        "update_lost_bound": float(np.sqrt((half_ulp**2).sum() * sample.expansion))
        if measured
        else np.nan,
    }


def _largest(values: Floats) -> float:
    return float(values.max()) if len(values) else np.nan


def _tabulate(step: int, rows: list[_Row], losses: dict[int, float]) -> Expected:
    columns = {name: np.array([row.columns[name] for row in rows]) for name in rows[0].columns}
    histogram = np.stack([row.counts for row in rows])
    quantiles = percentiles(histogram, columns["grad_min"], columns["grad_max"], GRAD_PERCENTILES)
    columns |= {f"grad_p{q}": v for q, v in zip(GRAD_PERCENTILES, quantiles, strict=True)}
    largest = np.maximum(columns["grad_max"], -columns["grad_min"])
    with np.errstate(invalid="ignore"):
        noise = (largest > 0) & (largest < _NOISE * np.nanmax(largest, initial=0.0))
    numel = np.array([row.sample.numel for row in rows])
    totals = {
        f"monitor/{tag}_norm": float(
            np.sqrt(np.nansum(numel * (columns[f"{what}_mean"] ** 2 + columns[f"{what}_std"] ** 2)))
        )
        for what, tag in (("weight", "param"), ("grad", "grad"))
    }
    for name, of in (("median", np.median), ("min", np.min), ("max", np.max)):
        totals[f"monitor/update_ratio_{name}"] = float(of(columns["update_ratio"]))
    totals["monitor/frozen_count"] = float(columns["frozen"].sum())
    return Expected(
        step=step,
        names=tuple(row.name for row in rows),
        columns=columns,
        histogram=histogram,
        totals=totals,
        losses=dict(losses),
        sampled=np.array([len(row.sample.indices) for row in rows]),
        noise=noise,
    )

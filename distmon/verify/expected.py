"""The reference: statistics of the unsharded model, computed in plain numpy.

It shares only the choice of the sample and the bin edges with the monitor, so the comparison covers
the monitor's tables, probe, collectives and formulas (`docs/sampling.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, GROUPS
from distmon.metrics import GRAD_PERCENTILES
from distmon.probe.log_bins import log_bin
from distmon.probe.percentiles import percentiles
from distmon.record.record import NO_UPDATE
from distmon.sampling.designs import gradient_samples, weight_samples, whole_sample
from distmon.sampling.reading import Reading
from distmon.sampling.sample import Sample
from distmon.verify.parallelisms import PLAIN, Workload

Floats = NDArray[np.float64]

SAMPLE_SEED = 0
EPS = 1e-12
"""Added to the weight norm in the update ratio; the monitor's setting `eps`."""
_STUDENT = 1.4305419921875
"""Half of the 97.7% quantile of Student's t with 4 degrees of freedom, by four terms."""
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
    activations: dict[str, dict[str, float]]
    """Statistics of the output of every module over the global batch."""
    noise: NDArray[np.bool_]
    """Parameters whose true gradient is zero, so that gradient and update are rounding noise."""


def expect(workload: Workload, steps: int, interval: int, reading: Reading) -> list[Expected]:
    """Train the unsharded model and return the reference for every observed step."""
    distributed = PLAIN.build(workload)
    parameters = dict(workload.model.named_parameters())
    groups = [g for optimizer in distributed.optimizers for g in optimizer.param_groups]
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    found: list[Expected] = []
    losses: dict[int, float] = {}
    quiet: set[str] = set()
    samples = _samples(parameters, reading)
    loss_eps = 0.0
    for step in range(1, steps + 1):
        workload.model.zero_grad()
        with _outputs(workload.model) as outputs:
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
            _Row(samples[name], p, before[name], rates.get(id(p)), name in quiet)
            for name, p in parameters.items()
            if p.is_floating_point()
        ]
        quiet = {row.name for row in rows if row.is_quiet}
        activations = {name: _activation(np.concatenate(v)) for name, v in outputs.items()}
        found.append(_tabulate(step, rows, losses, loss_eps, activations))
        losses = {}
    return found


@contextmanager
def _outputs(model: torch.nn.Module) -> Iterator[dict[str, list[Floats]]]:
    """Collect the outputs of every module, by plain hooks."""
    found: dict[str, list[Floats]] = {}

    def keep(name: str, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() > 1:
            found.setdefault(name, []).append(output.detach().double().numpy().ravel())

    handles = [
        module.register_forward_hook(lambda _m, _a, output, name=name: keep(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _activation(values: Floats) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "absmax": float(np.abs(values).max()),
        "rms": float(np.sqrt((values**2).mean())),
        "zero_fraction": float((values == 0).mean()),
    }


@dataclass(frozen=True)
class _Samples:
    """Which elements of one parameter the monitor reads."""

    update: Sample
    weight: Sample
    gradient: Sample
    histogram: Sample


def _samples(parameters: Mapping[str, torch.Tensor], reading: Reading) -> dict[str, _Samples]:
    read = {name: tuple(p.shape) for name, p in parameters.items() if p.is_floating_point()}
    names, shapes = [*read], [*read.values()]
    updates = weight_samples(names, shapes, reading.sample_size, SAMPLE_SEED)
    gradients = gradient_samples(names, shapes, SAMPLE_SEED)
    found = {}
    for name, update, gradient in zip(names, updates, gradients, strict=True):
        everything = whole_sample(name, update.numel, SAMPLE_SEED)
        found[name] = _Samples(
            update=update,
            weight=everything if reading.whole_weights else update,
            gradient=everything if reading.whole_gradients else gradient,
            histogram=everything if reading.whole_weights else update,
        )
    return found


class _Row:
    """One parameter at one step."""

    def __init__(
        self,
        samples: _Samples,
        parameter: torch.nn.Parameter,
        before: torch.Tensor,
        lr: float | None,
        was_quiet: bool,
    ) -> None:
        self.name = samples.update.name
        self.sample, self.gradient = samples.update, samples.gradient
        weight = _read(parameter, samples.weight)
        stepped = _read(parameter, self.sample)
        update = stepped - _read(before, self.sample)
        grad = _read(parameter.grad, self.gradient)
        grad_of_stepped = _read(parameter.grad, self.sample)
        self.counts = np.zeros(BINS)
        counted = _read(parameter.grad, samples.histogram)
        if counted is not None:
            bins = log_bin(torch.from_numpy(counted)).numpy()
            self.counts = np.bincount(bins, minlength=BINS).astype(np.float64)
        c = self.columns = {
            **_moments("weight", weight, samples.weight),
            "weight_absmax": _largest(np.abs(weight)),
            **_moments("grad", grad, self.gradient),
            "grad_max": np.nan if grad is None else _largest(grad),
            "grad_min": np.nan if grad is None else -_largest(-grad),
            "grad_zero_fraction": np.nan if grad is None else float((grad == 0).mean()),
            **_moments("update", update, self.sample),
            "update_absmax": _largest(np.abs(update)),
            **_lost(stepped, grad_of_stepped, update, self.sample),
            "lr": np.nan if lr is None else lr,
            "ndim": float(parameter.ndim),
            "requires_grad": float(parameter.requires_grad),
            "in_optimizer": float(lr is not None),
            "has_grad": float(grad is not None),
        }
        missed = grad is not None and np.any(grad) and not np.any(grad_of_stepped)
        if missed and not self.sample.whole:  # what moved is not in the sample
            c["update_norm_stderr"] = np.nan
        for what, values in (("weight", weight), ("grad", grad)):
            for kind, is_kind in (("nan", np.isnan), ("inf", np.isinf)):
                c[f"{what}_{kind}"] = np.nan if values is None else float(is_kind(values).sum())
        c["update_ratio"] = c["update_norm"] / (c["weight_norm"] + EPS)
        still = c["update_ratio"] <= NO_UPDATE and parameter.requires_grad and lr != 0
        no_gradient = grad is None or not parameter.grad.any()  # type: ignore[union-attr]
        incomplete = not self.sample.whole
        self.is_quiet = still and incomplete and c["grad_zero_fraction"] == 1
        known_zero = self.gradient.whole and c["grad_zero_fraction"] == 1
        # A zero update of the sample proves nothing about other elements while the sampled
        # gradient is zero too; the monitor then reads the whole gradient at the next observation.
        proven = not incomplete or grad_of_stepped is None or lr is None
        proven = proven or bool(np.any(grad_of_stepped)) or known_zero
        c["update_expected"] = float(
            parameter.requires_grad and lr != 0 and (proven or (was_quiet and no_gradient))
        )


@overload
def _read(tensor: torch.Tensor, sample: Sample) -> Floats: ...
@overload
def _read(tensor: torch.Tensor | None, sample: Sample) -> Floats | None: ...
def _read(tensor: torch.Tensor | None, sample: Sample) -> Floats | None:
    if tensor is None:
        return None
    values: Floats = tensor.detach().double().reshape(-1).numpy()[sample.indices]
    return values


def _moments(what: str, values: Floats | None, sample: Sample) -> dict[str, float]:
    """Estimate norm, its standard error, mean and standard deviation from the sample."""
    names = [f"{what}_{x}" for x in ("norm", "norm_stderr", "mean", "std")]
    if values is None or not len(values):
        return dict.fromkeys(names, np.nan)
    group = sample.element_groups
    squares = np.bincount(group, values**2, minlength=GROUPS) * sample.expansion
    square = squares.sum()
    share = np.bincount(group, minlength=GROUPS) / len(values)
    unsampled = 0.0 if sample.whole else 1 - len(values) / sample.numel
    deviation = ((squares - square * share) ** 2).sum()
    variance = GROUPS / (GROUPS - 1) * deviation * unsampled
    root = np.sqrt(square)
    norm = root * (1 + variance / square**2 / 8) if square > 0 else 0.0
    stderr = _STUDENT * np.sqrt(variance) / (2 * root) if square > 0 else 0.0
    mean = values.sum() * sample.expansion / sample.numel
    std = np.sqrt(max(square / sample.numel - mean**2, 0.0))
    if square == 0 and unsampled > 0:  # the sample shows nothing of the rest
        stderr = np.nan
        norm, mean, std = (np.nan,) * 3 if what == "grad" else (norm, mean, std)
    return dict(zip(names, map(float, (norm, stderr, mean, std)), strict=True))


def _lost(weight: Floats, grad: Floats | None, update: Floats, sample: Sample) -> dict[str, float]:
    """Return the fraction of updates lost to rounding, and a bound on their norm.

    An update is lost where the gradient is not zero but the weight did not change.
    """
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


def _tabulate(
    step: int,
    rows: list[_Row],
    losses: dict[int, float],
    loss_eps: float,
    activations: dict[str, dict[str, float]],
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
        activations=activations,
        noise=noise,
    )

"""The reference of one parameter at one step, from its sampled elements and from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, GROUPS
from distmon.probe.log_bins import log_bin
from distmon.record.record import NO_UPDATE
from distmon.sampling.designs import gradient_samples, weight_samples, whole_sample
from distmon.sampling.reading import Reading
from distmon.sampling.sample import Sample

Floats = NDArray[np.float64]

SAMPLE_SEED = 0
EPS = 1e-12
"""Added to the weight norm in the update ratio; the monitor's setting `eps`."""
_STUDENT = 1.4305419921875
"""Half of the 97.7% quantile of Student's t with 4 degrees of freedom, by four terms."""


@dataclass(frozen=True)
class ReadElements:
    """Which elements of one parameter the monitor reads."""

    update: Sample
    weight: Sample
    gradient: Sample
    histogram: Sample


def read_elements(
    parameters: Mapping[str, torch.Tensor], reading: Reading
) -> dict[str, ReadElements]:
    read = {name: tuple(p.shape) for name, p in parameters.items() if p.is_floating_point()}
    names, shapes = [*read], [*read.values()]
    updates = weight_samples(names, shapes, reading.sample_size, SAMPLE_SEED)
    gradients = gradient_samples(names, shapes, SAMPLE_SEED)
    found = {}
    for name, update, gradient in zip(names, updates, gradients, strict=True):
        everything = whole_sample(name, update.numel, SAMPLE_SEED)
        found[name] = ReadElements(
            update=update,
            weight=everything if reading.whole_weights else update,
            gradient=everything if reading.whole_gradients else gradient,
            histogram=everything if reading.whole_weights else update,
        )
    return found


class ExpectedRow:
    """One parameter at one step."""

    def __init__(
        self,
        samples: ReadElements,
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
        self.whole = {
            "weight_norm": float(torch.linalg.vector_norm(parameter.detach())),
            "grad_norm": np.nan,
            "update_norm": float(torch.linalg.vector_norm(parameter.detach() - before)),
        }
        if parameter.grad is not None:
            self.whole["grad_norm"] = float(torch.linalg.vector_norm(parameter.grad))
        self.counts = _histogram(_read(parameter.grad, samples.histogram))
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
        if grad is not None and grad_of_stepped is not None and not self.sample.whole:
            least = _least_error(grad, grad_of_stepped, stepped, update, self.sample)
            c["update_norm_stderr"] = np.maximum(
                c["update_norm_stderr"], least * c["update_norm"]
            )  # NaN where either is
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


def _histogram(values: Floats | None) -> Floats:
    if values is None:
        return np.zeros(BINS)
    bins = log_bin(torch.from_numpy(values)).numpy()
    return np.bincount(bins, minlength=BINS).astype(np.float64)


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


def _least_error(
    grad: Floats, graded: Floats, weight: Floats, update: Floats, sample: Sample
) -> float:
    """Return the least relative error of an update's norm; NaN where the sample cannot know it.

    `graded` is the gradient of the elements whose update is sampled.
    """
    moved = float(np.sum((graded != 0) & ((weight == 0) | (update != 0))))
    sparse = np.sum(grad == 0) > len(grad) / 2
    if np.any(grad) and not np.any(graded):  # what moved is not in the sample
        return np.nan
    if not sparse or not np.any(graded):
        return 0.0
    every_row = sample.row_strata == sample.rows > 1
    independent = moved if every_row else moved / sample.run
    unseen = 1 - len(update) / sample.numel
    return _STUDENT / 2 * np.sqrt(unseen / independent) if moved else np.nan


def _largest(values: Floats) -> float:
    return float(values.max()) if len(values) else np.nan

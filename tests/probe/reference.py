"""The columns of a row, computed the slow and obvious way in float64."""

from __future__ import annotations

import numpy as np
import torch

from csrc_triton.row_layout import GROUPS, MAX, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.probe.percentiles import bin_values
from distmon.sampling.sample import Sample


def pick(tensor: torch.Tensor, sample: Sample) -> np.ndarray:
    """The sampled elements in slot order, exact."""
    flat = tensor.detach().double().reshape(-1).numpy()
    return np.asarray(flat[sample.indices])


def reference_row(
    before: torch.Tensor,
    after: torch.Tensor,
    grad: torch.Tensor | None,
    sample: Sample,
    gradient: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """SUM and MAX columns of one parameter that is whole here and was stepped.

    `gradient` is index and group of the elements that the gradient columns are over, unless they
    are those of the sample.
    """
    sums, maxima = np.zeros(len(SUM_COLUMNS)), np.full(len(MAX_COLUMNS), -np.inf)
    indices, group = sample.indices, sample.element_groups
    gradient = gradient or (indices, group)
    w, old = pick(after, sample), pick(before, sample)
    g = np.full_like(w, np.nan) if grad is None else pick(grad, sample)
    finite = np.isfinite(w)
    moved = np.where(finite & np.isfinite(old), w - np.where(np.isfinite(old), old, 0), 0)
    moved = np.where(finite & np.isfinite(old), moved, 0)
    clean = np.where(finite, w, 0)

    def squares(what: str, x: np.ndarray, group: np.ndarray = group) -> None:
        first = SUM[f"{what}_sq0"]
        sums[first : first + GROUPS] = np.bincount(group, x * x, GROUPS) if len(x) else 0

    sums[SUM["w_count"]] = sums[SUM["u_count"]] = len(w)
    sums[SUM["w_sum"]] = clean.sum()
    sums[SUM["w_nan"]], sums[SUM["w_inf"]] = np.isnan(w).sum(), np.isinf(w).sum()
    squares("w", clean)
    sums[SUM["u_sum"]] = moved.sum()
    squares("u", moved)
    if finite.any():
        maxima[MAX["w_absmax"]] = np.abs(w[finite]).max()
    if len(w):
        maxima[MAX["u_absmax"]] = np.abs(moved).max()
    if grad is not None:
        good = np.isfinite(g)
        lost = good & (g != 0) & (clean != 0) & (moved == 0)
        sums[SUM["u_graded"]] = (good & (g != 0)).sum()
        sums[SUM["u_lost"]] = lost.sum()
        half_ulp = torch.finfo(after.dtype).eps / 2
        with np.errstate(divide="ignore"):
            binade = np.exp2(np.floor(np.log2(np.abs(clean[lost]))))
        sums[SUM["u_lost_bound_sq"]] = ((binade * half_ulp) ** 2).sum()
        g = grad.detach().double().reshape(-1).numpy()[gradient[0]]
        good = np.isfinite(g)
        sums[SUM["g_count"]] = len(g)
        sums[SUM["g_sum"]] = g[good].sum()
        sums[SUM["g_nan"]], sums[SUM["g_inf"]] = np.isnan(g).sum(), np.isinf(g).sum()
        sums[SUM["g_zero"]] = (g == 0).sum()
        squares("g", np.where(good, g, 0), gradient[1])
        if good.any():
            maxima[MAX["g_max"]], maxima[MAX["g_negmin"]] = g[good].max(), -g[good].min()
    return sums, maxima


def reference_bins(grad: torch.Tensor, sample: Sample) -> np.ndarray:
    """Histogram by looking for the nearest bin edges."""
    g = pick(grad, sample)
    g = g[np.isfinite(g)]
    values = bin_values()
    half = len(values) // 2
    from distmon.probe.percentiles import magnitude_edges

    edges = magnitude_edges()
    magnitude = np.searchsorted(edges, np.abs(g).astype(np.float32), side="right") - 1
    bins = np.where(np.signbit(g), half - 1 - magnitude, half + magnitude)
    return np.bincount(bins, minlength=len(values)).astype(np.float64)

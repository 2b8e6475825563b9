"""Gradient columns of a sparse gradient, from its values: what it does not list is zero."""

from __future__ import annotations

import torch

from csrc_triton.row_layout import GROUPS, MAX, SUM
from distmon.probe.finite import highest, is_nonzero, take_out_nonfinite
from distmon.probe.rows import Rows
from distmon.sampling.sample import Sample


def fill_sparse_gradient(
    rows: Rows, row: int, gradient: torch.Tensor, applied: torch.Tensor, sample: Sample
) -> None:
    """Fill the gradient columns of `row` such that they estimate its totals without an error.

    The columns stand for the elements of `sample`, as for every gradient, so each total is divided
    by its expansion and by the groups in the shares that are expected of them. On an accelerator
    this waits: how many values there are is known to the device alone.
    """
    values = gradient.detach().coalesce().values().reshape(1, -1)
    values = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
    extremes = torch.zeros(2, device=values.device)
    if values.numel():
        extremes = torch.cat((highest(values), highest(-values))).float()
        if values.numel() < sample.numel:
            extremes = extremes.clamp(min=0)
    nan, inf = take_out_nonfinite(values)
    nonzero = is_nonzero(values).sum(1, dtype=torch.float64)
    wide = values[0].double()
    share = torch.tensor(sample.group_share).to(values.device)
    part = sample.count / max(1, sample.numel)
    sums = {
        "g_count": torch.full_like(applied, sample.count),
        "g_sum": wide.sum() * part,
        "g_nan": nan[0].double(),
        "g_inf": inf[0].double(),
        "g_zero": (sample.numel - nonzero[0] - nan[0] - inf[0]) * part,
        "g_unreadable": torch.ones_like(applied),  # which sampled updates it moves is not looked up
    }
    for name, number in sums.items():
        rows.sums[row, SUM[name]] = number * applied
    squares = share * (wide.square_().sum() * (applied / sample.expansion))
    rows.sums[row, SUM["g_sq0"] : SUM["g_sq0"] + GROUPS] = squares
    rows.maxima[row, MAX["g_max"] : MAX["g_negmin"] + 1] = torch.where(
        applied > 0, extremes, -torch.inf
    )

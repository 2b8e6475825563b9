"""Partial gradients: each rank has a term, and the sum over ranks is the gradient.

The statistics of one term mean nothing, and adding whole gradients would be one more collective. So
the sampled elements themselves travel in the SUM buffer, and the gradient columns are computed from
their sums, after the reduction. Only parameters that can have such gradients take part.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, HALF_BINS, MAX, SUM
from distmon.layout import Shard
from distmon.probe.finite import highest, is_nonzero, take_out_nonfinite
from distmon.probe.log_bins import histogram_by_row
from distmon.probe.rows import Rows
from distmon.sampling.plan import SamplePlan

Floats = NDArray[np.float64]
Bins = NDArray[np.floating[Any]] | None
_GRADIENT_SUMS = [i for name, i in SUM.items() if name.startswith("g_") and name != "g_unreadable"]
_GRADIENT_MAXIMA = [MAX["g_max"], MAX["g_negmin"]]


class PartialGradients:
    """Where the sampled elements of such gradients lie here and in the buffer."""

    def __init__(self, plan: SamplePlan, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self.rows = [i for i, shard in enumerate(shards) if shard.may_be_partial]
        self._samples = [plan.gradient_samples[i] for i in self.rows]
        counts = [sample.count for sample in self._samples]
        self._begins = np.cumsum([0, *counts])
        self.size = int(self._begins[-1]) + len(self.rows)
        """Numbers in the buffer: every sampled element, then the share of each row that is here."""
        # On the device beforehand: a list as an index would be copied there, and waited for.
        self._sums = torch.tensor(_GRADIENT_SUMS).to(plan.device)
        self._maxima = torch.tensor(_GRADIENT_MAXIMA).to(plan.device)
        self._slots: dict[int, torch.Tensor] = {}
        self._offsets: dict[int, torch.Tensor] = {}
        for row, sample, begin in zip(self.rows, self._samples, self._begins, strict=False):
            local = shards[row].region.local(sample.indices)
            here = np.flatnonzero(local >= 0)
            self._slots[row] = torch.from_numpy(here + begin).to(plan.device)
            self._offsets[row] = torch.from_numpy(local[here]).to(plan.device)

    def move(
        self, rows: Rows, buffer: torch.Tensor, applied: torch.Tensor, only: Container[int]
    ) -> None:
        """Put this rank's terms into `buffer` and take what they gave out of `rows`.

        `applied` as in `Probe.measure`; `only` these parameters are touched.
        """
        for k, row in enumerate(self.rows):
            grad = self._shards[row].grad()
            if grad is None or row not in only:
                continue
            share = buffer[int(self._begins[-1]) + k]
            values = grad.reshape(-1)[self._offsets[row]].double() * applied[row]
            buffer[self._slots[row]] = values
            share.copy_(applied[row] / self._shards[row].partial_count())
            rows.sums[row].index_fill_(0, self._sums, 0.0)
            rows.maxima[row].index_fill_(0, self._maxima, -torch.inf)
            if rows.bins is not None:
                rows.bins[row] = 0.0

    def fill(self, reduced: Floats, sums: Floats, maxima: Floats, bins: Bins) -> None:
        """Gradient columns from the added elements; `reduced` is the buffer after the reduction.

        A row in which a rank's term is missing, because it failed to observe, stays empty.
        """
        for k, row in enumerate(self.rows):
            begin, end = self._begins[k : k + 2]
            copies = reduced[self._begins[-1] + k]
            if copies < 0.5 or abs(copies - round(copies)) > 1e-6:
                continue
            values = torch.from_numpy(reduced[begin:end] / copies).view(1, -1)
            count = float(end - begin)
            maxima[row, MAX["g_max"]] = float(highest(values)[0])
            maxima[row, MAX["g_negmin"]] = float(highest(-values)[0])
            nan, inf = (float(n[0]) for n in take_out_nonfinite(values))
            nonzero = float(is_nonzero(values).sum())
            group = self._samples[k].element_groups
            squares = np.bincount(group, weights=values[0].numpy() ** 2, minlength=GROUPS)
            sums[row, SUM["g_sq0"] : SUM["g_sq0"] + GROUPS] = squares
            for name, number in (
                ("g_count", count),
                ("g_sum", float(values.sum())),
                ("g_nan", nan),
                ("g_inf", inf),
                ("g_zero", count - nonzero - nan - inf),
            ):
                sums[row, SUM[name]] = number
            if bins is not None:
                bins[row] = histogram_by_row(values)[0].numpy()
                bins[row, HALF_BINS] -= nan + inf

"""Gradients that ranks still have to add, against the gradient that they add up to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from reference import reference_bins

from csrc_triton.row_layout import BINS, GROUPS, MAX, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.layout import Shard, capture
from distmon.layout.plain import PlainShard
from distmon.layout.shard import description
from distmon.probe import Rows
from distmon.probe.partial_gradients import PartialGradients
from distmon.probe.torch_probe import TorchProbe
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading

CPU = torch.device("cpu")
GRADIENT = [name for name in SUM_COLUMNS if name.startswith("g_")]


def _rows(count: int) -> Rows:
    return Rows(
        torch.full((count, len(SUM_COLUMNS)), torch.nan, dtype=torch.float64),
        torch.full((count, len(MAX_COLUMNS)), torch.nan),
        torch.full((count, BINS), torch.nan, dtype=torch.float64),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class PartialShard(PlainShard):
    addends: int

    def partial_count(self) -> int:
        return self.addends


def _rank(grads: list[torch.Tensor | None], addends: int, exact: bool = False) -> list[Shard]:
    model = torch.nn.ParameterList(torch.zeros(g.shape) for g in _shapes(exact))
    for parameter, grad in zip(model, grads, strict=True):
        parameter.grad = grad
    return [
        PartialShard(**description(s) | {"may_be_partial": True}, addends=addends)
        for s in capture(model)
    ]


def _shapes(exact: bool) -> list[torch.Tensor]:
    return [torch.empty(40), torch.empty(3000) if exact else torch.empty(20, 500)]


def _observe(shards: list[Shard], exact: bool) -> tuple[Rows, torch.Tensor, PartialGradients]:
    plan = build_plan(shards, Reading(1024, exact, exact), 0, CPU)
    probe, rows = TorchProbe(plan, shards), _rows(len(shards))
    added = PartialGradients(plan, shards)
    buffer = torch.zeros(added.size, dtype=torch.float64)
    applied = torch.ones(len(shards), dtype=torch.float64)
    probe.snapshot()
    probe.measure(rows, applied)
    added.move(rows, buffer, applied, range(len(shards)))
    return rows, buffer, added


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_columns_are_those_of_the_sum(exact: bool, replicas: int) -> None:
    torch.manual_seed(0)
    parts = [[torch.randn(t.shape) for t in _shapes(exact)] for _ in range(3)]
    parts[1][0][5] = torch.inf
    parts[2][1].view(-1)[:100] = torch.nan
    for part in parts:
        part[0][7] = 0
    total = [sum(p[i].double() for p in parts) for i in range(2)]

    observed = [_observe(_rank(part, 3, exact), exact) for part in parts * replicas]
    sums = sum(rows.sums for rows, _, _ in observed).numpy()
    maxima = torch.stack([rows.maxima for rows, _, _ in observed]).amax(0).double().numpy()
    bins = sum(rows.bins for rows, _, _ in observed).numpy()
    buffer = sum(buffer for _, buffer, _ in observed).numpy()
    observed[0][2].fill(buffer, sums, maxima, bins)

    alone = [replace(s, may_be_partial=False) for s in _rank([t.float() for t in total], 1, exact)]
    plan = build_plan(alone, Reading(1024, exact, exact), 0, CPU)
    expected = _rows(2)
    probe = TorchProbe(plan, alone)
    probe.snapshot()
    probe.measure(expected, torch.ones(2, dtype=torch.float64))
    wanted = expected.sums.numpy()
    if exact:  # read whole, no group is told from another
        for table in (sums, wanted):
            table[:, SUM["g_sq0"]] = table[:, SUM["g_sq0"] : SUM["g_sq0"] + GROUPS].sum(1)
            table[:, SUM["g_sq0"] + 1 : SUM["g_sq0"] + GROUPS] = 0
    for name in GRADIENT:
        # Adding in float32 or in float64 differs by one rounding of each element.
        assert sums[:, SUM[name]] == pytest.approx(wanted[:, SUM[name]], rel=1e-5), name
    for name in ("g_max", "g_negmin"):
        assert maxima[:, MAX[name]] == pytest.approx(expected.maxima[:, MAX[name]].numpy(), 1e-6)
    for row, sample in enumerate(plan.gradient_samples):
        wanted_bins = reference_bins(total[row], sample)
        assert np.abs(bins[row] - wanted_bins).sum() <= 4  # an element on the edge of a bin


def test_without_an_addend_nothing_is_claimed() -> None:
    part = [torch.ones(t.shape) for t in _shapes(False)]
    rows, buffer, added = _observe(_rank(part, 2), False)
    sums, maxima = rows.sums.numpy(), rows.maxima.double().numpy()
    added.fill(buffer.numpy(), sums, maxima, None)
    assert not sums[:, [SUM[name] for name in GRADIENT]].any()
    assert np.isneginf(maxima[:, MAX["g_max"]]).all()


def test_no_gradient_on_any_rank() -> None:
    rows, buffer, added = _observe(_rank([None, None], 2), False)
    assert not buffer.any()
    sums = rows.sums.numpy()
    added.fill(buffer.numpy() * 2, sums, rows.maxima.double().numpy(), None)
    assert not sums[:, SUM["g_count"]].any()

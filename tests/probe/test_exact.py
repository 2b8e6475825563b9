"""Exact mode: every element counts, nothing is copied."""

from __future__ import annotations

import pytest
import torch
from reference import reference_bins, reference_row

from csrc_triton.row_layout import MAX, SUM
from distmon.layout import capture
from distmon.probe import TorchProbe
from distmon.probe.exact import PART_ELEMENTS, nonfinite_counts, parts
from distmon.reduce.buffers import HostBuffers
from distmon.reduce.reduced_view import BufferSizes
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading
from distmon.sampling.sample import choose

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_exact_columns_cover_every_element(dtype: torch.dtype) -> None:
    sizes = (0, 5, 1024, PART_ELEMENTS + 3, 2 * PART_ELEMENTS)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    for i, parameter in enumerate(params):
        if i != 2:
            parameter.grad = torch.randn(sizes[i]).to(dtype)
    if sizes[3]:
        params[3].data[-1] = torch.nan
        params[3].grad[77] = torch.inf  # type: ignore[index]
    shards = capture(torch.nn.ParameterList(params))
    plan = build_plan(shards, Reading(whole_gradients=True, whole_weights=True), 0, CPU)
    probe = TorchProbe(plan, shards)
    rows = HostBuffers(BufferSizes(len(params)), rank=0).rows
    probe.snapshot()
    probe.measure(rows, torch.ones(len(params), dtype=torch.float64))
    for i, parameter in enumerate(params):
        whole = choose("", sizes[i], max(1, sizes[i]), 0)
        sums, maxima = reference_row(parameter, parameter, parameter.grad, whole)
        for name in ("count", "nan", "inf"):
            for what in "wg":
                column = SUM[f"{what}_{name}"]
                assert rows.sums[i, column].item() == sums[column]
        assert rows.sums[i, SUM["g_zero"]].item() == sums[SUM["g_zero"]]
        for what in "wg":
            first = SUM[f"{what}_sq0"]
            got, want = rows.sums[i, first : first + 8].sum(), sums[first : first + 8].sum()
            assert got.item() == pytest.approx(want, rel=1e-12)
            total = SUM[f"{what}_sum"]
            assert rows.sums[i, total].item() == pytest.approx(
                sums[total], rel=1e-9, abs=1e-9 * max(1, sizes[i]) ** 0.5
            )
        for name in ("w_absmax", "g_max", "g_negmin"):
            assert rows.maxima[i, MAX[name]].item() == pytest.approx(maxima[MAX[name]], rel=2**-23)
        if parameter.grad is not None and rows.bins is not None:
            assert rows.bins[i].tolist() == reference_bins(parameter.grad, whole).tolist()


def test_parts_of_any_layout_hold_every_element_once() -> None:
    x = torch.arange(60_000.0).view(3, 200, 100)
    for tensor in (x, x.transpose(0, 2), x[:, ::2], x.permute(1, 2, 0)):
        found = [*parts(tensor)]
        assert torch.equal(torch.cat(found).sort().values, tensor.reshape(-1).sort().values)


def test_nonfinite_counts_name_weight_and_gradient() -> None:
    model = torch.nn.Linear(600, 600)
    model.weight.data[599, 599] = torch.nan
    model.bias.grad = torch.zeros(600)
    model.bias.grad[3:6] = -torch.inf
    counts = nonfinite_counts(capture(model))
    assert counts.tolist() == [[1, 0, 0, 0], [0, 0, 0, 3]]

"""The torch probe against float64, over dtypes, sizes and awkward values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import reference_bins, reference_row
from row_reference import gradient_elements

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM, SUM_COLUMNS
from distmon.layout import capture
from distmon.probe import Rows, TorchProbe
from distmon.reduce.buffers import HostBuffers
from distmon.reduce.reduced_view import BufferSizes
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading

CPU = torch.device("cpu")
SIZES = (0, 1, 7, 31, 768, 1023, 1024, 1025, 4097, 20_000)
# Sums over at most 8192 numbers of one dtype, taken in float64: rounding of the last addition.
TOLERANCE = 1e-12
# The squares of a float32 difference carry its rounding: half a unit in the last place, twice.
UPDATE_TOLERANCE = 2.0**-22


def _rows(count: int) -> Rows:
    rows = HostBuffers(BufferSizes(count), rank=0).rows
    for tensor in (rows.sums, rows.maxima, rows.bins):
        assert tensor is not None
        tensor.fill_(torch.nan)
    return rows


def _values(kind: str, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    if kind == "tiny":
        return x * 1e-38
    if kind == "huge":
        return x.clamp(-3, 3) * 1e37
    if kind == "sparse":
        return x * (torch.rand(size, generator=generator) < 0.1)
    if kind == "one-signed":
        return -x.abs() - 0.1
    if kind == "nonfinite":
        x[::3] = torch.nan
        x[1::7] = torch.inf
        x[2::11] = -torch.inf
    return x


def _case(
    kind: str, dtype: torch.dtype, with_grad: bool = True
) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    params, steps = [], []
    for seed, size in enumerate(SIZES):
        parameter = torch.nn.Parameter(_values(kind, size, seed).to(dtype))
        if with_grad and seed % 4 != 3:
            parameter.grad = _values(kind, size, seed + 100).to(dtype)
        params.append(parameter)
        steps.append((_values("normal", size, seed + 200) * 1e-3).to(dtype))
    return params, steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "tiny", "huge", "sparse", "one-signed", "nonfinite"])
def test_rows_equal_the_float64_reference(kind: str, dtype: torch.dtype) -> None:
    params, steps = _case(kind, dtype)
    shards = capture(torch.nn.ParameterList(params))
    plan = build_plan(shards, Reading(1024), 3, CPU)
    probe = TorchProbe(plan, shards)
    rows = _rows(len(params))
    probe.snapshot()
    before = [p.detach().clone() for p in params]
    for parameter, step in zip(params, steps, strict=True):
        parameter.data.add_(step)
    probe.measure(rows, torch.ones(len(params), dtype=torch.float64))
    assert rows.bins is not None
    for i, parameter in enumerate(params):
        read = gradient_elements(plan, i)
        sums, maxima = reference_row(before[i], parameter, parameter.grad, plan.samples[i], read)
        exact = 1e-300 if dtype == torch.float64 else UPDATE_TOLERANCE
        for name, column in SUM.items():
            relative = max(exact, TOLERANCE) if name.startswith("u_") else TOLERANCE
            scale = np.abs(sums[column])
            if name.endswith("_sum"):  # the error of a sum is relative to the sum of magnitudes
                first = SUM[f"{name[0]}_sq0"]
                count = max(1, sums[SUM[f"{name[0]}_count"]])
                scale = np.sqrt(sums[first : first + 8].sum() * count)
            assert rows.sums[i, column].item() == pytest.approx(
                sums[column], rel=relative, abs=relative * scale + 1e-300
            ), f"{name} of size {SIZES[i]}"
        assert rows.maxima[i].double().tolist() == pytest.approx(
            maxima.tolist(), rel=2.0**-23, abs=2.0**-149
        )
        expected = np.zeros(BINS)
        if parameter.grad is not None:
            expected = reference_bins(parameter.grad, plan.samples[i])
        assert rows.bins[i].tolist() == expected.tolist()


def test_a_parameter_that_was_not_stepped_has_weights_only() -> None:
    params, _ = _case("normal", torch.float32)
    shards = capture(torch.nn.ParameterList(params))
    plan = build_plan(shards, Reading(1024), 0, CPU)
    rows = _rows(len(params))
    TorchProbe(plan, shards).measure(rows, torch.zeros(len(params), dtype=torch.float64))
    used = [i for i, name in enumerate(SUM_COLUMNS) if name[:2] in ("g_", "u_")]
    assert rows.sums[:, used].abs().max() == 0
    assert rows.sums[:, SUM["w_count"]].tolist() == [len(s.indices) for s in plan.samples]
    assert rows.bins is not None
    assert rows.bins.abs().max() == 0
    assert torch.isneginf(rows.maxima[:, 1:]).all()
    assert len(MAX_COLUMNS) == rows.maxima.shape[1]


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced"])
def test_strides_do_not_matter(layout: str) -> None:
    base = torch.randn(12, 10, 16, 20)
    plain = torch.nn.Parameter(base.clone())
    if layout == "transposed":
        strided = torch.nn.Parameter(base.transpose(0, 3).contiguous().transpose(0, 3))
    elif layout == "channels_last":
        strided = torch.nn.Parameter(base.contiguous(memory_format=torch.channels_last))
    else:
        strided = torch.nn.Parameter(torch.cat((base, base), 3)[..., :20].detach())
    assert not strided.is_contiguous()
    found = []
    for parameter in (plain, strided):
        parameter.grad = torch.zeros_like(parameter).copy_(base * 2)
        shards = capture(torch.nn.ParameterDict({"w": parameter}))
        plan = build_plan(shards, Reading(1024), 0, CPU)
        probe, rows = TorchProbe(plan, shards), _rows(1)
        probe.snapshot()
        parameter.data.mul_(1.01)
        probe.measure(rows, torch.ones(1, dtype=torch.float64))
        found.append((rows.sums.clone(), rows.maxima.clone(), probe.row_checksums.clone()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_checksum_sees_one_bit_and_one_swap() -> None:
    parameter = torch.nn.Parameter(torch.randn(2048))
    shards = capture(torch.nn.ParameterDict({"w": parameter}))
    plan = build_plan(shards, Reading(1024), 0, CPU)
    probe, rows = TorchProbe(plan, shards), _rows(1)
    applied = torch.ones(1, dtype=torch.float64)

    def checksum() -> int:
        probe.measure(rows, applied)
        return int(probe.row_checksums.sum())

    first = checksum()
    assert first == checksum()
    assert first != 0
    i, j = plan.samples[0].indices[[5, 900]].tolist()
    bits = parameter.data.view(torch.int32)
    bits[i] ^= 1
    assert checksum() != first
    bits[i] ^= 1
    assert checksum() == first
    parameter.data[[i, j]] = parameter.data[[j, i]]
    assert checksum() != first


def test_whole_gradients_are_counted_on_suspicion() -> None:
    parameter = torch.nn.Parameter(torch.ones(100_000))
    parameter.grad = torch.zeros(100_000)
    parameter.grad[77_777] = 1e-30
    shards = capture(torch.nn.ParameterDict({"w": parameter}))
    probe, rows = TorchProbe(build_plan(shards, Reading(64), 0, CPU), shards), _rows(1)
    rows.clear()
    probe.read_whole_gradients(rows, [0])
    assert rows.sums[0, SUM["whole_count"]] == 100_000
    assert rows.sums[0, SUM["whole_nonzero"]] == 1

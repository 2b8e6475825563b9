"""The same plan through both backends gives the same rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_reference import Case, run
from test_sampled_stats import _SecondHalf, numbers

from csrc_triton.row_layout import SUM_COLUMNS
from distmon.probe import TorchProbe
from distmon.probe.triton_probe import TritonProbe

pytestmark = pytest.mark.usefixtures("launches")

EXACT = [i for i, n in enumerate(SUM_COLUMNS) if not n.endswith("_sum") and "_sq" not in n]
KINDS = st.sampled_from(["normal", "nonfinite", "denormal", "extreme"])


@st.composite
def parameters(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    size, seed = draw(st.integers(1, 400)), draw(st.integers(0, 10**6))
    before = numbers(draw(KINDS), size, dtype, seed)
    if draw(st.booleans()):
        after = before.clone()
    else:
        after = (before.double() * 1.001).to(dtype)
    grad = numbers(draw(KINDS), size, dtype, seed + 1) if draw(st.booleans()) else None
    return Case(before, after, grad, draw(st.sampled_from([0.0, 1.0])))


def agree(cases: list[Case], sample: int, exact: bool) -> None:
    mine, triton_probe, _ = run(cases, TritonProbe, sample, exact)
    theirs, torch_probe, plan = run(cases, TorchProbe, sample, exact)
    assert torch.equal(mine.sums[:, EXACT], theirs.sums[:, EXACT])
    assert torch.equal(mine.maxima, theirs.maxima)
    assert torch.equal(mine.bins, theirs.bins)
    nan = [c.after.isnan().any() for c in cases]
    kept = torch.tensor([not n for n in nan])
    assert torch.equal(triton_probe.row_checksums[kept], torch_probe.row_checksums[kept])
    if not any(nan):
        assert torch.equal(triton_probe.row_checksums, torch_probe.row_checksums)
    # Both add n numbers in fp64 in some order; a sum's error is relative to the magnitudes.
    for column, name in enumerate(SUM_COLUMNS):
        if column in EXACT:
            continue
        for i, case in enumerate(cases):
            values = [case.after, case.before, *([] if case.grad is None else [case.grad])]
            top = max(
                float(np.nan_to_num(v.double().numpy(), posinf=0, neginf=0).__abs__().max())
                for v in values
            )
            size = 2 * top if name.endswith("_sum") else (2 * top) ** 2
            error = case.after.numel() ** 2 * 2.0**-52 * size
            gap = abs(float(mine.sums[i, column] - theirs.sums[i, column]))
            assert gap <= error, f"row {i} {name}: {gap} > {error}"
    assert len(plan.names) == len(cases)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases=st.lists(parameters(), min_size=1, max_size=4), sample=st.sampled_from([8, 40, 256]))
def test_any_parameters(cases: list[Case], sample: int) -> None:
    agree(cases, sample, exact=False)


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases=st.lists(parameters(), min_size=1, max_size=3))
def test_any_parameters_in_exact_mode(cases: list[Case]) -> None:
    agree(cases, 8, exact=True)


def test_a_half_shard_and_strides() -> None:
    whole = torch.randn(3000)
    half = Case(whole[1500:], whole[1500:] + 1e-3, whole[1500:] * 2, region=_SecondHalf(1500))
    flipped = torch.randn(30, 40).t()
    agree([half, Case(flipped, flipped * 1.5, torch.randn(40, 30))], 1024, exact=False)


def test_whole_gradients_are_counted_alike() -> None:
    grad = torch.tensor([0.0, 1.0, float("nan"), 0.0])
    cases = [Case(grad, grad, grad), Case(grad, grad, None), Case(grad, grad, grad)]
    results = []
    for probe_type in (TritonProbe, TorchProbe):
        rows, probe, _ = run(cases, probe_type)
        probe.read_whole_gradients(rows, [0, 1])
        results.append(rows.sums)
    assert torch.equal(results[0][:, EXACT], results[1][:, EXACT])

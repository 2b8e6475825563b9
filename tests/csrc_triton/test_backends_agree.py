"""The same plan through both backends gives the same rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_reference import COUNTS, Case, assert_probes_agree, run
from test_sampled_stats import _SecondHalf, numbers

from distmon.probe import TorchProbe
from distmon.probe.triton_probe import TritonProbe

pytestmark = pytest.mark.usefixtures("launches")

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


def assert_agree(cases: list[Case], sample: int, exact: bool) -> None:
    assert_probes_agree(cases, TritonProbe, TorchProbe, sample, exact)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases=st.lists(parameters(), min_size=1, max_size=4), sample=st.sampled_from([8, 40, 256]))
def test_any_parameters(cases: list[Case], sample: int) -> None:
    assert_agree(cases, sample, exact=False)


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases=st.lists(parameters(), min_size=1, max_size=3))
def test_any_parameters_in_exact_mode(cases: list[Case]) -> None:
    assert_agree(cases, 8, exact=True)


def test_a_half_shard_and_strides() -> None:
    whole = torch.randn(3000)
    x = whole[1500:]
    half = Case(x, x + 1e-3, x * 2, region=_SecondHalf(1500), global_shape=(3000,))
    flipped = torch.randn(30, 40).t()
    assert_agree([half, Case(flipped, flipped * 1.5, torch.randn(40, 30))], 1024, exact=False)


def test_whole_gradients_are_counted_alike() -> None:
    grad = torch.tensor([0.0, 1.0, float("nan"), 0.0])
    cases = [Case(grad, grad, grad), Case(grad, grad, None), Case(grad, grad, grad)]
    results = []
    for probe_type in (TritonProbe, TorchProbe):
        rows, probe, _ = run(cases, probe_type)
        probe.read_whole_gradients(rows, [0, 1])
        results.append(rows.sums)
    assert torch.equal(results[0][:, COUNTS], results[1][:, COUNTS])

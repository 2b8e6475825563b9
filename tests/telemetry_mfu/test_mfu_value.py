"""MFU is a plain quotient that says where it comes from, and is refused when it cannot be."""

from __future__ import annotations

import pytest
from mfu_models import LLAMA_7B

from distmon.telemetry.mfu.model_flops import ModelFlops, given_flops
from distmon.telemetry.mfu.peaks import Peak, PeakTable
from distmon.telemetry.mfu.unavailable import MfuUnavailableError
from distmon.telemetry.mfu.utilization import Mfu

A100 = PeakTable.shipped().find("NVIDIA A100-SXM4-80GB", "bf16")


def test_mfu_is_work_per_second_over_what_the_devices_can_do() -> None:
    reading = Mfu(given_flops(4e10), A100).value(30_000, devices=8)
    assert reading.value == pytest.approx(4e10 * 30_000 / (8 * 312e12))
    assert reading.problem is None


def test_flops_per_step_go_with_steps_per_second() -> None:
    reading = Mfu(given_flops(1.248e15, per="step"), A100).value(0.5, devices=4)
    assert reading.value == pytest.approx(0.5)
    assert reading.provenance.describe().startswith(
        "FLOPs given by the user (1.248e+15 FLOPs per step)"
    )


def test_the_provenance_is_one_line() -> None:
    mfu = Mfu(LLAMA_7B.flops(causal=True), A100)
    assert mfu.provenance.describe() == (
        "6N + causal attention by formula (4.286e+10 FLOPs per token), "
        "peak 312 TFLOP/s (bf16 dense, NVIDIA A100 datasheet)"
    )
    assert Peak(1e12, None, "given by the user").describe() == "1 TFLOP/s (given by the user)"


def test_an_mfu_above_100_percent_is_a_fault_in_the_inputs() -> None:
    reading = Mfu(given_flops(4e10), A100).value(94_848, devices=8)
    assert reading.value is None
    assert reading.problem == (
        "MFU of 152% is impossible: check the peak of 312 TFLOP/s (bf16 dense, NVIDIA A100 "
        "datasheet), the 4e+10 FLOPs per token (FLOPs given by the user), and the 9.485e+04 "
        "tokens/s on 8 devices"
    )
    assert Mfu(given_flops(312e12), A100).value(1, devices=1).value == 1.0


@pytest.mark.parametrize(
    ("per_second", "devices"), [(0.0, 8), (-1.0, 8), (float("nan"), 8), (float("inf"), 8), (1, 0)]
)
def test_without_throughput_there_is_no_mfu(per_second: float, devices: int) -> None:
    reading = Mfu(given_flops(4e10), A100).value(per_second, devices)
    assert reading.value is None
    assert reading.problem == f"no MFU: {per_second:g} tokens/s on {devices} devices"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_flops_must_be_a_positive_number(value: float) -> None:
    with pytest.raises(MfuUnavailableError, match="must be a positive number"):
        ModelFlops(value, "by hand", causal=None)

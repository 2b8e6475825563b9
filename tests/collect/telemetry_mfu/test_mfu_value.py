"""MFU is FLOP/s divided by the peak FLOP/s, with a provenance."""

from __future__ import annotations

import pytest
from mfu_models import LLAMA_7B

from distmon.collect.telemetry.mfu.model_flops import ModelFlops, given_flops
from distmon.collect.telemetry.mfu.peaks import Peak, PeakTable
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError
from distmon.collect.telemetry.mfu.utilization import Mfu
from distmon.collect.telemetry.utilization import Utilization
from distmon.record.telemetry import mfu_metrics

A100 = PeakTable.shipped().find("NVIDIA A100-SXM4-80GB", "bf16")


def test_mfu_is_work_per_second_over_what_the_devices_can_do() -> None:
    value = Mfu(given_flops(4e10), A100).value(30_000, devices=8)
    assert value == pytest.approx(4e10 * 30_000 / (8 * 312e12))


def test_flops_per_step_go_with_steps_per_second() -> None:
    mfu = Mfu(given_flops(1.248e15, per="step"), A100)
    assert mfu.value(0.5, devices=4) == pytest.approx(0.5)
    assert mfu.provenance.describe().startswith(
        "FLOPs given by the user (1.248e+15 FLOPs per step)"
    )


def test_the_provenance_is_one_line() -> None:
    mfu = Mfu(LLAMA_7B.flops(causal=True), A100)
    assert mfu.provenance.describe() == (
        "6N + causal attention by formula (4.286e+10 FLOPs per token), "
        "peak 312 TFLOP/s (bf16 dense, NVIDIA A100 datasheet)"
    )
    assert Peak(1e12, None, "given by the user").describe() == "1 TFLOP/s (given by the user)"


def test_an_mfu_above_100_percent_is_recorded_under_another_name() -> None:
    utilization = Utilization()
    utilization.mfu = Mfu(given_flops(4e10), A100)
    sent = utilization.fields()
    assert sent == {"flops_per_token": 4e10, "peak_flops": 312e12}
    rate = {"performance/tokens_per_second": 94_848.0}
    assert mfu_metrics(4e10, 312e12, rate, devices=8) == {
        "performance/mfu_over_limit": pytest.approx(1.52, abs=0.001)
    }
    assert mfu_metrics(4e10, 312e12, rate, devices=16) == {
        "performance/mfu": pytest.approx(0.76, abs=0.001)
    }
    assert Mfu(given_flops(312e12), A100).value(1, devices=1) == 1.0


@pytest.mark.parametrize(
    ("per_second", "devices"), [(0.0, 8), (-1.0, 8), (float("nan"), 8), (float("inf"), 8), (1, 0)]
)
def test_without_throughput_there_is_no_mfu(per_second: float, devices: int) -> None:
    mfu = Mfu(given_flops(4e10), A100)
    assert mfu.value(per_second, devices) is None
    assert mfu_metrics(4e10, 312e12, {"performance/tokens_per_second": per_second}, devices) == {}


def test_unknown_flops_or_peak_give_no_mfu() -> None:
    assert Utilization().fields() == {"flops_per_token": 0.0, "peak_flops": 0.0}
    rate = {"performance/tokens_per_second": 1.0}
    assert mfu_metrics(0.0, 312e12, rate, 1) == mfu_metrics(4e10, 0.0, rate, 1) == {}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_flops_must_be_a_positive_number(value: float) -> None:
    with pytest.raises(MfuUnavailableError, match="must be a positive number"):
        ModelFlops(value, "by hand", causal=None)

"""The peak is that of exactly this device, or there is none."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from distmon.collect.telemetry.mfu.measured_peak import measure_peak, peak_dtype
from distmon.collect.telemetry.mfu.peaks import PEAK_DTYPES, Peak, PeakRow, PeakTable, resolve_peak
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError

TABLE = PeakTable.shipped()


@pytest.mark.parametrize(
    ("device_name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("A100-SXM4-40GB", "bf16", 312),  # drivers before 470 do not say NVIDIA
        ("NVIDIA A800-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A30", "bf16", 165),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA GB300", "bf16", 2500),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L20", "bf16", 119.5),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "fp16", 71),
        ("GeForce RTX 3090", "fp16", 71),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X VF", "bf16", 1307.4),
        ("AMD Instinct MI325X", "bf16", 1307.4),
        ("AMD Instinct™ MI355X", "bf16", 2516.6),
    ],
)
def test_known_devices(device_name: str, dtype: str, tflops: float) -> None:
    assert TABLE.find(device_name, dtype).flops == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H100",  # SXM, PCIe or NVL
        "NVIDIA H200 NVLink",
        "NVIDIA L40S-48Q",  # a virtual part of a device
        "NVIDIA GB10",
        "NVIDIA A100",
        "Tesla V100",
        "AMD Instinct MI250X / MI250",  # what the driver calls both
        "AMD Radeon RX 7900 XTX",
        "",
    ],
)
def test_other_names_are_not_guessed(device_name: str) -> None:
    with pytest.raises(MfuUnavailableError) as refusal:
        TABLE.find(device_name, "bf16")
    assert str(refusal.value) == (
        f'no MFU: the peak of "{device_name}" is not in the table; '
        "set mfu.peak_flops, or mfu.measure_peak"
    )


def test_a_dtype_that_a_device_is_not_made_for_has_no_peak() -> None:
    with pytest.raises(MfuUnavailableError, match='no bf16 peak of "Tesla T4", only fp16, fp32'):
        TABLE.find("Tesla T4", "bf16")


@pytest.mark.parametrize(
    ("device_name", "share"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 312 / 7),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 312 * 3 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", 312 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 989.4 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 7G.80GB", 989.4),
        ("NVIDIA A30 MIG 1g.6gb", 165 / 4),
    ],
)
def test_a_slice_has_its_share_of_the_peak(device_name: str, share: float) -> None:
    peak = TABLE.find(device_name, "bf16")
    assert peak.flops == pytest.approx(share * 1e12)
    parent = device_name.split(" MIG ")[0]
    assert f"slices of {parent}, " in peak.source


def test_slices_that_do_not_exist_are_refused() -> None:
    for name in ("NVIDIA L40S MIG 1g.5gb", "NVIDIA A30 MIG 7g.24gb", "NVIDIA A30 MIG 0g.6gb"):
        with pytest.raises(MfuUnavailableError, match="is not a known MIG slice"):
            TABLE.find(name, "bf16")


@pytest.mark.parametrize(
    ("device_name", "units", "flops_per_clock", "clock_ghz"),
    [
        ("NVIDIA A30", 56, 2048, 1.44),
        ("NVIDIA A40", 84, 1024, 1.74),
        ("NVIDIA A10", 72, 1024, 1.695),
        ("NVIDIA RTX A6000", 84, 1024, 1.8),
        ("NVIDIA RTX A5000", 64, 1024, 1.695),
        ("NVIDIA RTX A4000", 48, 1024, 1.56),
        ("NVIDIA H200", 132, 4096, 1.83),
        ("NVIDIA RTX 6000 Ada Generation", 142, 1024, 2.505),
        ("NVIDIA GeForce RTX 5090", 170, 512, 2.407),
        ("NVIDIA GeForce RTX 4080", 76, 512, 2.505),
        ("NVIDIA GeForce RTX 3090", 82, 512, 1.695),
        ("Quadro RTX 6000", 72, 1024, 1.77),
        ("AMD Instinct MI355X", 256, 4096, 2.4),
        ("AMD Instinct MI350X", 256, 4096, 2.2),
        ("AMD Instinct MI300X", 304, 2048, 2.1),
        ("AMD Instinct MI300A", 228, 2048, 2.1),
        ("AMD Instinct MI250", 104, 1024, 1.7),
        ("AMD Instinct MI100", 120, 1024, 1.502),
    ],
)
def test_a_peak_is_what_all_units_do_in_a_clock(
    device_name: str, units: int, flops_per_clock: int, clock_ghz: float
) -> None:
    """GeForce cards: with fp32 accumulation, half of the rate."""
    expected = units * flops_per_clock * clock_ghz * 1e9
    assert TABLE.find(device_name, "fp16").flops == pytest.approx(expected, rel=0.005)


def test_the_rates_of_a_row_fit_together() -> None:
    """A sparse rate among dense ones, or a rate without tensor cores, stands out."""
    assert len(TABLE.rows) > 50
    for row in TABLE.rows:
        assert row.source
        assert all(value > 0 for value in row.tflops.values())
        for fast, slow in (("fp8", "bf16"), ("bf16", "tf32")):
            if {fast, slow} <= set(row.tflops):
                assert row.tflops[fast] / row.tflops[slow] == pytest.approx(2, rel=0.05), row
        if "GeForce" in row.device:
            assert row.note.startswith("with fp32 accumulation")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("NVIDIA X1", 1.0, "sheet"), ("x1", 2.0, "sheet")], "two rows .* have the name x1"),
        ([("NVIDIA X1", 0.0, "sheet")], "bad bf16 peak of NVIDIA X1"),
        ([("NVIDIA X1", float("nan"), "sheet")], "bad bf16 peak of NVIDIA X1"),
        ([("NVIDIA X1", 1.0, "")], "needs a number and a source"),
    ],
)
def test_a_bad_table_is_refused(rows: list[tuple[str, float, str]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PeakTable(PeakRow(name, (), {"bf16": value}, None, src, "") for name, value, src in rows)


def test_the_table_is_part_of_the_package() -> None:
    root = Path(__file__).resolve().parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["distmon"]
    table = root / "distmon/collect/telemetry/mfu/peaks.csv"
    assert any(table in (root / "distmon").glob(pattern) for pattern in patterns)


def test_the_users_number_comes_first_then_the_table_then_a_measurement() -> None:
    def measured() -> Peak:
        return Peak(5e12, "bf16", "measured")

    def peak(**inputs: object) -> Peak:
        return resolve_peak(**{"device_name": "NVIDIA H200", "dtype": "bf16", **inputs})  # type: ignore[arg-type]

    assert peak(given=1e12, measure=measured) == Peak(1e12, "bf16", "given by the user")
    assert peak(measure=measured).source.startswith("public specification lists: the chip of")
    assert peak(device_name="NVIDIA X1", measure=measured) == measured()
    assert peak(device_name=None, measure=measured) == measured()
    with pytest.raises(MfuUnavailableError, match="peak table has no CPUs"):
        peak(device_name=None)
    with pytest.raises(MfuUnavailableError, match="NVIDIA X1"):
        peak(device_name="NVIDIA X1")
    with pytest.raises(MfuUnavailableError, match=r"no peak for the dtype None; set mfu\.dtype"):
        peak(dtype=None, measure=measured)
    with pytest.raises(MfuUnavailableError, match="must be a positive number, not -1"):
        peak(given=-1.0)


def clock(step: float) -> Callable[[], float]:
    """A clock that goes on by `step` seconds every time that it is read."""
    ticks = count()
    return lambda: next(ticks) * step


def test_a_measured_peak_is_the_products_flops_over_their_time() -> None:
    peak = measure_peak(torch.device("cpu"), "fp32", size=8, seconds=3.0, now=clock(0.5))
    assert peak == Peak(2 * 8**3 / 0.5, "fp32", "measured, 8 x 8 matrix product")


def test_what_cannot_be_measured_is_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(MfuUnavailableError, match="a peak in fp8 cannot be measured"):
        measure_peak(cpu, "fp8")
    with pytest.raises(MfuUnavailableError, match="torch multiplies float32 in fp32 here"):
        measure_peak(cpu, "tf32")
    with pytest.raises(MfuUnavailableError, match="measuring the peak failed: "):
        measure_peak(torch.device("meta"), "fp32", size=8)


def test_the_dtype_of_a_run_has_a_name_in_the_table() -> None:
    names = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.float8_e4m3fn: "fp8",
        torch.float64: None,
    }
    for dtype, name in names.items():
        assert peak_dtype(dtype, "cpu") == name
        assert name is None or name in PEAK_DTYPES
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_dtype(torch.float32, "cuda") == "tf32"
        assert peak_dtype(torch.float32, "cpu") == "fp32"
        torch.set_float32_matmul_precision("highest")
        assert peak_dtype(torch.float32, "cuda") == "fp32"
    finally:
        torch.set_float32_matmul_precision(before)

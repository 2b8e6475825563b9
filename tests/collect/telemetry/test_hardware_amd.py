"""The AMD reader against a stand-in for amdsmi written from its documentation; no GPU was there."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from fake_driver import wanted

from distmon.collect.telemetry.hardware import describe_devices
from distmon.collect.telemetry.hardware.amd import open_amd
from distmon.collect.telemetry.hardware.throttle import HARDWARE_THERMAL, POWER_CAP


class SmiError(Exception):
    def __init__(self, err_code: int) -> None:
        super().__init__(f"AMDSMI_STATUS {err_code}")
        self.err_code = err_code


class FakeSmi:
    """Handles are numbers; `fails` maps a function to the code that it fails with."""

    class AmdSmiTemperatureType:
        HOTSPOT, VRAM = "hotspot", "vram"

    class AmdSmiTemperatureMetric:
        CURRENT = "current"

    class AmdSmiClkType:
        GFX, MEM = "gfx", "mem"

    def __init__(self, **fails: int) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("amdsmi_"):
            self.calls.append(name)
            if name in self.fails:
                raise SmiError(self.fails[name])
        return super().__getattribute__(name)

    def amdsmi_init(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, Any]:
        return {"hip_id": 1 - handle, "hip_uuid": f"GPU-beef00000000000{handle}"}

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": "MI300X", "asic_serial": f"0xBEEF00000000000{handle}"}

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, Any]:
        return {"driver_name": "amdgpu", "driver_version": f"6.8.{handle}"}

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, Any]:
        return {"vram_total": 196592, "vram_used": 1000 + handle}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, Any]:
        return {"gfx_activity": 80 + handle, "umc_activity": "N/A", "mm_activity": "N/A"}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {"current_socket_power": "N/A", "average_socket_power": 500 + handle}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, Any]:
        return {"power_cap": (750 + handle) * 10**6}

    def amdsmi_get_temp_metric(self, handle: int, sensor: str, metric: str) -> int:
        assert metric == "current"
        return handle + {"hotspot": 90, "vram": 70}[sensor]

    def amdsmi_get_clock_info(self, handle: int, domain: str) -> dict[str, Any]:
        return {"clk": handle + 2100} if domain == "gfx" else {"cur_clk": handle + 1300}

    def amdsmi_get_violation_status(self, handle: int) -> dict[str, Any]:
        return {
            "active_ppt_pwr": handle == 1,
            "active_socket_thrm": True,
            "active_hbm_thrm": True,
            "active_vr_thrm": "N/A",
            "active_prochot_thrm": False,
        }

    def amdsmi_get_gpu_total_ecc_count(self, handle: int) -> dict[str, Any]:
        return {"correctable_count": 4, "uncorrectable_count": handle}

    def amdsmi_get_pcie_info(self, handle: int) -> dict[str, Any]:
        return {"pcie_metric": {"pcie_replay_count": 9 + handle}}

    def amdsmi_get_gpu_process_list(self, handle: int) -> list[dict[str, Any]]:
        return [{"pid": 1}] * (handle + 1)


def as_torch_gives_it(letters: str) -> str:
    """HIP's 16 bytes are letters, and torch writes bytes in hexadecimal."""
    digits = letters.encode().hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


SECOND = wanted(0, uuid=as_torch_gives_it("beef000000000001"))


def test_values_and_units() -> None:
    reader, reason = open_amd(SECOND, FakeSmi())
    assert reader is not None, reason
    assert reader.device == "MI300X GPU-beef000000000001"
    reading = reader.read()
    assert reading.memory_used_bytes == 1001 * 2**20
    assert reading.memory_total_bytes == 196592 * 2**20
    assert reading.gpu_utilization == 0.81
    assert math.isnan(reading.memory_utilization)
    assert (reading.power_watts, reading.power_limit_watts) == (501, 751)
    assert (reading.temperature_c, reading.memory_temperature_c) == (91, 71)
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz) == (2101, 1301)
    assert reading.throttle_reasons == POWER_CAP | HARDWARE_THERMAL
    assert (reading.ecc_corrected, reading.ecc_uncorrected) == (4, 1)
    assert (reading.pcie_replay, reading.processes) == (10, 2)
    assert math.isnan(reading.nvlink_errors)
    assert reader.missing == {"memory_utilization": "the driver has no value"}


def test_before_rocm_6_4_the_serial_number_is_the_identity() -> None:
    reader, reason = open_amd(SECOND, FakeSmi(amdsmi_get_gpu_enumeration_info=2))
    assert reader is not None, reason
    assert reader.read().power_watts == 501


def test_errors_lose_one_field_and_unsupported_queries_run_once() -> None:
    smi = FakeSmi(amdsmi_get_power_info=10, amdsmi_get_violation_status=2)
    reader, _ = open_amd(SECOND, smi)
    assert reader is not None
    for _ in range(2):
        reading = reader.read()
        assert math.isnan(reading.power_watts)
        assert reading.throttle_reasons is None
        assert reading.temperature_c == 91
    assert smi.calls.count("amdsmi_get_power_info") == 2
    assert smi.calls.count("amdsmi_get_violation_status") == 1


def test_a_driver_that_is_gone_is_a_problem() -> None:
    reader, _ = open_amd(SECOND, FakeSmi(amdsmi_get_gpu_vram_usage=34))
    assert reader is not None
    assert reader.read().problem == "AMDSMI_STATUS 34"


def test_why_there_is_no_reader() -> None:
    assert open_amd(SECOND, FakeSmi(amdsmi_init=18)) == (
        None,
        "amdsmi cannot be initialized: AMDSMI_STATUS 18",
    )
    _, reason = open_amd(wanted(0), FakeSmi())
    assert reason is not None
    assert "its index does not identify it" in reason


def test_absent_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    reader, reason = open_amd(SECOND)
    assert reader is None
    assert reason is not None
    assert reason.startswith("the Python package amdsmi, a part of ROCm, cannot be imported")


def test_doctor_learns_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml, first, second = describe_devices(amdsmi_module=FakeSmi())
    assert nvml.problem is not None
    assert (first.name, first.uuid, first.driver) == ("MI300X", "GPU-beef000000000000", "6.8.0")
    assert (second.driver, second.memory_bytes) == ("6.8.1", 196592 * 2**20)

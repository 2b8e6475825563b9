"""NVML through the real binding, on a fake driver."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import asdict
from types import ModuleType

import pynvml
import pytest
from fake_driver import FakeDriver, gpu, uuid_of, wanted

from distmon.collect.telemetry.hardware import NUMBERS, HardwareReading, describe_devices
from distmon.collect.telemetry.hardware.nvml import load_binding, open_nvml

NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, LOST, UNKNOWN = 3, 4, 10, 15, 999

CALLS = {
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization", "memory_utilization"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetTemperatureV": {"temperature_c"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle_reasons"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie_replay"},
    "nvmlDeviceGetPcieThroughput": {"pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"},
    "nvmlDeviceGetNvLinkState": {"nvlink_errors"},
    "nvmlDeviceGetFieldValues": {"nvlink_errors", "memory_temperature_c"},
    "nvmlDeviceGetComputeRunningProcesses_v2": {"processes"},
}


def expected(number: int) -> dict[str, float]:
    return {
        "memory_used_bytes": (number + 1) * 2**30,
        "memory_total_bytes": (number + 1) * 2**33,
        "gpu_utilization": (90 + number) / 100,
        "memory_utilization": (40 + number) / 100,
        "power_watts": 300 + number / 1000,
        "power_limit_watts": 700 + number / 1000,
        "temperature_c": 60 + number,
        "memory_temperature_c": 70 + number,
        "sm_clock_mhz": 1900 + number,
        "memory_clock_mhz": 2600 + number,
        "throttle_reasons": 1 << number,
        "ecc_corrected": 10 + number,
        "ecc_uncorrected": number,
        "pcie_replay": 20 + number,
        "pcie_tx_bytes_per_second": (500 + number) * 1000,
        "pcie_rx_bytes_per_second": (800 + number) * 1000,
        "nvlink_errors": 111 + number,
        "processes": 1 + number,
    }


def given(reading: HardwareReading) -> dict[str, float]:
    """The fields that have a value."""
    values = {name: asdict(reading)[name] for name in expected(0)}
    return {k: v for k, v in values.items() if v is not None and not math.isnan(v)}


def test_every_field_has_its_value_and_unit(driver: FakeDriver) -> None:
    driver.write(gpu(0), gpu(1), gpu(2))
    reading = driver.open(1).read()
    assert given(reading) == expected(1)
    assert reading.problem is None
    assert {field.name for field in NUMBERS} | {"throttle_reasons"} == set(expected(0))


CUDA_ORDER = (2, 0, 3, 1)


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_reads_its_own_gpu_although_cuda_counts_otherwise(
    driver: FakeDriver, rank: int
) -> None:
    driver.write(*(gpu(number) for number in range(4)))
    mine = CUDA_ORDER[rank]
    visible_by_uuid = ",".join(f"GPU-{uuid_of(n)[:3]}" for n in CUDA_ORDER)
    for device in (
        wanted(rank, uuid=uuid_of(mine)),
        wanted(rank, uuid=uuid_of(mine), visible="2,0,3,1"),
        wanted(rank, visible=visible_by_uuid),
    ):
        reader, reason = open_nvml(device, driver.nvml)
        assert reader is not None, reason
        assert given(reader.read()) == expected(mine)
        assert reader.device == f"Fake-{mine} GPU-{uuid_of(mine)}"


def test_an_index_decides_only_when_the_order_is_that_of_the_bus(driver: FakeDriver) -> None:
    driver.write(gpu(3), gpu(0), gpu(2))  # NVML's own order is not that of the bus either
    reader, reason = open_nvml(wanted(0, visible="1"), driver.nvml)
    assert reader is None
    assert reason is not None
    assert "its index does not identify it" in reason
    reader, reason = open_nvml(wanted(0, visible="1", order_is_bus=True), driver.nvml)
    assert reader is not None, reason
    assert given(reader.read()) == expected(2)


def test_a_mig_slice_has_its_own_memory_and_the_heat_of_its_board(driver: FakeDriver) -> None:
    first, second = f"MIG-{uuid_of(8)}", f"MIG-{uuid_of(9)}"
    board = f"GPU-{uuid_of(1)}"
    driver.write(
        gpu(0),
        gpu(1, mig=1),
        f"mig uuid={first} of={board} name=Slice-a used=10 total=20 procs=5",
        f"mig uuid={second} of={board} name=Slice-b used=30 total=40 procs=6",
    )
    board_fields = expected(1)
    for name in ("gpu_utilization", "memory_utilization"):
        del board_fields[name]
    for device in (wanted(0, uuid=uuid_of(9)), wanted(0, visible=second)):
        reader, reason = open_nvml(device, driver.nvml)
        assert reader is not None, reason
        slice_fields = {"memory_used_bytes": 30, "memory_total_bytes": 40, "processes": 6}
        assert given(reader.read()) == board_fields | slice_fields
        assert reader.missing["gpu_utilization"] == "Not Supported"
    reader, reason = open_nvml(wanted(0, uuid=uuid_of(1), visible=first), driver.nvml)
    assert reader is not None, reason
    assert reader.read().memory_used_bytes == 10
    reader, reason = open_nvml(wanted(0, uuid=uuid_of(1)), driver.nvml)
    assert reader is None
    assert reason is not None
    assert "has 2 MIG devices" in reason


def test_slices_count_only_while_mig_is_on(driver: FakeDriver) -> None:
    driver.write(gpu(0, mig=0), f"mig uuid=MIG-{uuid_of(8)} of=GPU-{uuid_of(0)} used=1 total=2")
    assert given(driver.open(0).read()) == expected(0)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, UNKNOWN])
def test_a_call_that_fails_costs_its_own_fields_only(driver: FakeDriver, code: int) -> None:
    for call, fields in CALLS.items():
        driver.write(gpu(0), gpu(1), f"fail {call} {code} GPU-{uuid_of(1)}")
        reader = driver.open(1)
        left = {k: v for k, v in expected(1).items() if k not in fields}
        assert given(reader.read()) == left, call
        assert set(reader.missing) == fields, call
        driver.write(gpu(0), gpu(1))
        again = left if code == NOT_SUPPORTED else expected(1)
        assert given(reader.read()) == again, call
        assert set(reader.missing) == expected(1).keys() - again.keys(), call


def test_a_value_that_the_driver_does_not_have_is_a_missing_field(driver: FakeDriver) -> None:
    no_links = {"links": None}
    no_ecc = {"corrected": None, "lost_bits": None}
    driver.write(gpu(0, **no_links, **no_ecc, f82=None))
    reader = driver.open()
    missing = {"nvlink_errors", "ecc_corrected", "ecc_uncorrected", "memory_temperature_c"}
    assert given(reader.read()).keys() == expected(0).keys() - missing
    assert set(reader.missing.values()) == {"Not Supported"}


@pytest.mark.parametrize(
    ("fields", "errors"),
    [((38, 45, 52, 59), 4), ((161, 162, 163), 3 * (1 + 2)), ((206, 207, 208, 211), 4 * (1 + 2))],
)
def test_nvlink_errors_of_each_generation_are_added_up(
    driver: FakeDriver, fields: tuple[int, ...], errors: int
) -> None:
    counters = {"f38": None, "f45": None, "f52": None} | {f"f{field}": 1 for field in fields}
    driver.write(gpu(0, **counters))
    assert driver.open().read().nvlink_errors == errors


@pytest.mark.parametrize("survives", range(0, 90, 9))
def test_a_gpu_that_falls_off_the_bus_at_any_call_is_a_problem_and_not_a_crash(
    driver: FakeDriver, survives: int
) -> None:
    driver.write(gpu(0), gpu(1))
    reader, other = driver.open(0), driver.open(1)
    opening_calls = 10
    driver.write(gpu(0), gpu(1), f"lost GPU-{uuid_of(0)} {opening_calls + survives}")
    readings = [reader.read() for _ in range(3)]
    assert [r.problem for r in readings][-1] == "GPU is lost"
    for reading in readings:
        assert reading.problem == "GPU is lost" or reading.problem is None
        assert given(reading) == ({} if reading.problem else expected(0))
    assert given(other.read()) == expected(1)
    reader.close()
    reader, reason = open_nvml(wanted(uuid=uuid_of(0)), driver.nvml)
    assert reader is None
    assert reason is not None
    assert "GPU 0 of NVML does not respond: GPU is lost" in reason


def test_a_gpu_that_answers_nothing_but_errors_is_a_problem(driver: FakeDriver) -> None:
    driver.write(gpu(0))
    reader = driver.open()
    driver.write(gpu(0), *(f"fail {call} {UNKNOWN}" for call in CALLS))
    reading = reader.read()
    assert reading.problem == "Unknown Error"
    assert given(reading) == {}
    driver.write(gpu(0))
    assert given(reader.read()) == expected(0)


def test_an_unresponsive_gpu_does_not_affect_others(driver: FakeDriver) -> None:
    driver.write(gpu(0), gpu(1), f"lost GPU-{uuid_of(0)} 0")
    assert given(driver.open(1).read()) == expected(1)
    # One answers, but without a UUID nothing says that it is ours.
    reader, reason = open_nvml(wanted(0), driver.nvml)
    assert reader is None
    assert reason is not None
    assert "among 2 GPUs" in reason


def test_an_older_driver_lacks_functions_but_no_field(old_driver: FakeDriver) -> None:
    old_driver.write(gpu(0), gpu(1))
    reader = old_driver.open(1)
    assert given(reader.read()) == expected(1)
    assert reader.missing == {}


@pytest.mark.parametrize(
    "gone",
    [
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    ],
)
def test_another_version_of_the_binding_lacks_functions_but_no_field(
    driver: FakeDriver, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.write(gpu(0))
    monkeypatch.delattr(driver.nvml, gone)
    assert given(driver.open().read()) == expected(0)


def test_why_there_is_no_reader_is_one_sentence(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.write("init 9")
    assert open_nvml(wanted(), driver.nvml) == (
        None,
        "NVML cannot be initialized: Driver Not Loaded",
    )
    driver.write()
    assert open_nvml(wanted(uuid="ab"), driver.nvml) == (
        None,
        "ab is not among the listed devices (none)",
    )
    driver.write(gpu(0), f"fail nvmlDeviceGetCount_v2 {UNKNOWN}")
    assert open_nvml(wanted(), driver.nvml) == (
        None,
        "NVML cannot list its devices: Unknown Error",
    )

    def no_such_file(_name: str) -> None:
        raise OSError

    monkeypatch.setattr(driver.nvml, "nvmlLib", None)
    monkeypatch.setattr(driver.nvml, "CDLL", no_such_file)
    reason = "NVML cannot be initialized: NVML Shared Library Not Found"
    assert open_nvml(wanted(), driver.nvml) == (None, reason)


def test_a_module_that_only_has_the_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert "is not that of nvidia-ml-py (it has no nvmlInit)" in load_binding()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader, reason = open_nvml(wanted())
    assert reader is None
    assert reason is not None
    assert reason.startswith("the Python package nvidia-ml-py cannot be imported")


def test_nvml_is_given_back_as_often_as_it_was_taken(driver: FakeDriver) -> None:
    driver.write(gpu(0))
    driver.open().close()
    open_nvml(wanted(uuid="none"), driver.nvml)
    describe_devices(driver.nvml)
    with pytest.raises(driver.nvml.NVMLError, match="Uninitialized"):
        driver.nvml.nvmlDeviceGetCount()


def test_doctor_learns_of_every_device_and_why_not(driver: FakeDriver) -> None:
    driver.write(gpu(0), gpu(1), gpu(2, power=None), f"lost GPU-{uuid_of(1)} 0")
    first, third, unresponsive = describe_devices(driver.nvml)
    assert (first.name, first.uuid) == ("Fake-0", f"GPU-{uuid_of(0)}")
    assert (first.driver, first.memory_bytes) == ("560.35.03", 2**33)
    assert (first.missing, first.problem) == ({}, None)
    assert third.missing == {"power_watts": "Not Supported"}
    assert unresponsive.problem == "GPU 1 of NVML does not respond: GPU is lost"
    driver.write("init 9")
    (only,) = describe_devices(driver.nvml)
    assert only.problem == "NVML cannot be initialized: Driver Not Loaded"


def test_pynvml_finds_the_library_as_it_does_on_a_machine_with_a_gpu(driver: FakeDriver) -> None:
    driver.write(gpu(0), gpu(1))
    assert load_binding() is pynvml
    code = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver.library.parent)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == "2\n"


def test_only_the_recorded_fields_are_asked_for(driver: FakeDriver) -> None:
    """Every call takes a lock of the driver; that of the PCIe throughput takes 20 ms besides."""
    driver.write(gpu(0))
    asked: list[str] = []

    class Asked:
        """The binding, which notes what is asked."""

        def __getattr__(self, name: str) -> object:
            asked.append(name)
            return getattr(driver.nvml, name)

    reader, reason = open_nvml(wanted(0), Asked(), fields=("power_watts", "temperature_c"))
    assert reader is not None, reason
    asked.clear()
    reading = reader.read()
    assert asked == ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperatureV"]
    assert math.isnan(reading.processes)
    assert reading.power_watts == expected(0)["power_watts"]

"""The questions to NVML, one call each, and what its errors mean.

`nvml` is the module `pynvml` of nvidia-ml-py. Older drivers and bindings lack newer functions and
newer ones drop the old, so some questions know several names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from distmon.telemetry.hardware.device_match import ListedDevice
from distmon.telemetry.hardware.field_by_field import Question, Refusal

_NOT_SUPPORTED: Final = 3
_FUNCTION_NOT_FOUND: Final = 13
_NEVER: Final = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, 22, 25, 26})
"""Not supported, function not found, no ECC on a vGPU, version mismatch, deprecated."""
_LOST: Final = frozenset({1, 9, 15, 16, 18, 28})
"""Uninitialised, driver not loaded, GPU lost, reset required, versions differ, GPU not found."""

_NO_SUCH_LINK: Final = frozenset({2, _NOT_SUPPORTED})
"""Invalid argument, or not supported when there is no NVLink at all."""

_VALUE_KINDS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_MEMORY_TEMPERATURE: Final = 82
_LINK_TOTALS: Final = (38, 45, 52, 59)
"""Errors in flits, in data, replays, recoveries, over all links: up to NVLink 3."""
_PER_LINK: Final = ((161, 162, 163), (206, 207, 208, 211))
"""Replays, recoveries, CRC errors of NVLink 4; bad packets, overruns, bad receptions and link
integrity errors of NVLink 5. The field's scope is the number of the link."""


def code_of(error: Exception) -> int | None:
    """NVML's number for the error; by attribute, because each copy of the module has its class."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def judge(error: Exception) -> Refusal:
    """What an error from NVML or from its binding means."""
    code = code_of(error)
    if isinstance(error, AttributeError) or type(error).__name__ == "NVMLLibraryMismatchError":
        return Refusal.NEVER
    if code in _NEVER:
        return Refusal.NEVER
    return Refusal.LOST if code in _LOST else Refusal.NOW


def questions(nvml: Any, device: ListedDevice) -> list[Question]:
    """Everything that is asked of the device.

    A MIG slice has memory and processes of its own; power, heat, clocks and links are the board's.
    """
    own, board = device.handle, device.board

    def clock(kind: int) -> Callable[[], tuple[float, ...]]:
        return lambda: (nvml.nvmlDeviceGetClockInfo(board, kind),)

    def ecc(kind: int) -> Callable[[], tuple[float, ...]]:
        return lambda: (nvml.nvmlDeviceGetTotalEccErrors(board, kind, 0),)

    def pcie(direction: int) -> Callable[[], tuple[float, ...]]:
        # KB/s; the call itself waits for 20 ms.
        return lambda: (nvml.nvmlDeviceGetPcieThroughput(board, direction) * 1000,)

    return [
        Question(("memory_used_bytes", "memory_total_bytes"), lambda: _memory(nvml, own)),
        Question(("gpu_utilisation", "memory_utilisation"), lambda: _utilisation(nvml, own)),
        Question(("power_watts",), lambda: (nvml.nvmlDeviceGetPowerUsage(board) / 1000,)),
        Question(
            ("power_limit_watts",), lambda: (nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1000,)
        ),
        Question(("temperature_c",), lambda: (_temperature(nvml, board),)),
        Question(("memory_temperature_c",), lambda: (_memory_temperature(nvml, board),)),
        Question(("sm_clock_mhz",), clock(1)),
        Question(("memory_clock_mhz",), clock(2)),
        Question(("throttle_reasons",), lambda: (_throttle_reasons(nvml, board),)),
        Question(("ecc_corrected",), ecc(0)),
        Question(("ecc_uncorrected",), ecc(1)),
        Question(("pcie_replay",), lambda: (nvml.nvmlDeviceGetPcieReplayCounter(board),)),
        Question(("pcie_tx_bytes_per_second",), pcie(0)),
        Question(("pcie_rx_bytes_per_second",), pcie(1)),
        Question(("nvlink_errors",), lambda: (_nvlink_errors(nvml, board),)),
        Question(("processes",), lambda: (_processes(nvml, own),)),
    ]


def _memory(nvml: Any, handle: Any) -> tuple[float, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.used, memory.total


def _utilisation(nvml: Any, handle: Any) -> tuple[float, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def _temperature(nvml: Any, handle: Any) -> float:
    return _first_there(
        lambda: nvml.nvmlDeviceGetTemperatureV(handle, 0),
        lambda: nvml.nvmlDeviceGetTemperature(handle, 0),
    )


def _throttle_reasons(nvml: Any, handle: Any) -> int:
    return int(
        _first_there(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
    )


def _processes(nvml: Any, handle: Any) -> float:
    return _first_there(
        lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)),
        lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)),
        lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


def _memory_temperature(nvml: Any, handle: Any) -> float:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [_MEMORY_TEMPERATURE])
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return _number(value)


def _nvlink_errors(nvml: Any, handle: Any) -> float:
    """The sum over links and kinds of errors; which counters exist depends on the generation."""
    links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_up(nvml, handle, link)]
    if not links:
        raise nvml.NVMLError(_NOT_SUPPORTED)
    asked: list[list[Any]] = [list(_LINK_TOTALS)]
    asked += [[(field, link) for field in fields for link in links] for fields in _PER_LINK]
    for fields in asked:
        values = nvml.nvmlDeviceGetFieldValues(handle, fields)
        known = [_number(value) for value in values if not value.nvmlReturn]
        if known:
            return sum(known)
    return math.nan


def _is_up(nvml: Any, handle: Any, link: int) -> bool:
    """Whether the link exists and works; GPUs have from none to all of them."""
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError as error:
        if code_of(error) not in _NO_SUCH_LINK:
            raise
        return False


def _number(value: Any) -> float:
    return float(getattr(value.value, _VALUE_KINDS[value.valueType]))


def _first_there(*calls: Callable[[], float]) -> float:
    """The answer of the first function that both the driver and the binding have."""
    for call in calls[:-1]:
        try:
            return call()
        except Exception as error:
            if not isinstance(error, AttributeError) and code_of(error) != _FUNCTION_NOT_FOUND:
                raise
    return calls[-1]()

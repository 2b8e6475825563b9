"""The NVML queries, one call each, and the classification of NVML errors.

`nvml` is the module `pynvml` of nvidia-ml-py. Older drivers and bindings lack newer functions and
newer ones drop old functions, so some queries try several names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from distmon.collect.telemetry.hardware.device_match import ListedDevice
from distmon.collect.telemetry.hardware.device_queries import Query, QueryFailure

_NOT_SUPPORTED: Final = 3
_FUNCTION_NOT_FOUND: Final = 13
_NEVER: Final = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, 22, 25, 26})
"""Not supported, function not found, no ECC on a vGPU, version mismatch, deprecated."""
_LOST: Final = frozenset({1, 9, 15, 16, 18, 28})
"""Uninitialized, driver not loaded, GPU lost, reset required, versions differ, GPU not found."""

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
    """Return NVML's error code; by attribute, because each copy of the module has its own class."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def classify_error(error: Exception) -> QueryFailure:
    """Classify an error of NVML or of its binding."""
    code = code_of(error)
    if isinstance(error, AttributeError) or type(error).__name__ == "NVMLLibraryMismatchError":
        return QueryFailure.NEVER
    if code in _NEVER:
        return QueryFailure.NEVER
    return QueryFailure.LOST if code in _LOST else QueryFailure.NOW


def queries(nvml: Any, device: ListedDevice) -> list[Query]:
    """Return all queries of a device.

    A MIG slice has its own memory and processes; power, temperature, clocks and links are those of
    the board.
    """
    own, board = device.handle, device.board

    def clock(kind: int) -> Callable[[], tuple[float, ...]]:
        return lambda: (nvml.nvmlDeviceGetClockInfo(board, kind),)

    def ecc(kind: int) -> Callable[[], tuple[float, ...]]:
        return lambda: (nvml.nvmlDeviceGetTotalEccErrors(board, kind, 0),)

    def pcie(direction: int) -> Callable[[], tuple[float, ...]]:
        # In KB/s; the call itself takes 20 ms.
        return lambda: (nvml.nvmlDeviceGetPcieThroughput(board, direction) * 1000,)

    return [
        Query(("memory_used_bytes", "memory_total_bytes"), lambda: _memory(nvml, own)),
        Query(("gpu_utilization", "memory_utilization"), lambda: _utilization(nvml, own)),
        Query(("power_watts",), lambda: (nvml.nvmlDeviceGetPowerUsage(board) / 1000,)),
        Query(
            ("power_limit_watts",), lambda: (nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1000,)
        ),
        Query(("temperature_c",), lambda: (_temperature(nvml, board),)),
        Query(("memory_temperature_c",), lambda: (_memory_temperature(nvml, board),)),
        Query(("sm_clock_mhz",), clock(1)),
        Query(("memory_clock_mhz",), clock(2)),
        Query(("throttle_reasons",), lambda: (_throttle_reasons(nvml, board),)),
        Query(("ecc_corrected",), ecc(0)),
        Query(("ecc_uncorrected",), ecc(1)),
        Query(("pcie_replay",), lambda: (nvml.nvmlDeviceGetPcieReplayCounter(board),)),
        Query(("pcie_tx_bytes_per_second",), pcie(0)),
        Query(("pcie_rx_bytes_per_second",), pcie(1)),
        Query(("nvlink_errors",), lambda: (_nvlink_errors(nvml, board),)),
        Query(("processes",), lambda: (_processes(nvml, own),)),
    ]


def _memory(nvml: Any, handle: Any) -> tuple[float, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.used, memory.total


def _utilization(nvml: Any, handle: Any) -> tuple[float, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def _temperature(nvml: Any, handle: Any) -> float:
    return _first_available(
        lambda: nvml.nvmlDeviceGetTemperatureV(handle, 0),
        lambda: nvml.nvmlDeviceGetTemperature(handle, 0),
    )


def _throttle_reasons(nvml: Any, handle: Any) -> int:
    return int(
        _first_available(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
    )


def _processes(nvml: Any, handle: Any) -> float:
    return _first_available(
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
    """Return the sum over links and kinds of errors; the counters depend on the generation."""
    links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_up(nvml, handle, link)]
    if not links:
        raise nvml.NVMLError(_NOT_SUPPORTED)
    candidates: list[list[Any]] = [list(_LINK_TOTALS)]
    candidates += [[(field, link) for field in fields for link in links] for fields in _PER_LINK]
    for fields in candidates:
        values = nvml.nvmlDeviceGetFieldValues(handle, fields)
        known = [_number(value) for value in values if not value.nvmlReturn]
        if known:
            return sum(known)
    return math.nan


def _is_up(nvml: Any, handle: Any, link: int) -> bool:
    """Return whether the link exists and is active; the number of links depends on the GPU."""
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError as error:
        if code_of(error) not in _NO_SUCH_LINK:
            raise
        return False


def _number(value: Any) -> float:
    return float(getattr(value.value, _VALUE_KINDS[value.valueType]))


def _first_available(*calls: Callable[[], float]) -> float:
    """Return the result of the first function that both the driver and the binding have."""
    for call in calls[:-1]:
        try:
            return call()
        except Exception as error:
            if not isinstance(error, AttributeError) and code_of(error) != _FUNCTION_NOT_FOUND:
                raise
    return calls[-1]()

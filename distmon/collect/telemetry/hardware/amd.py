"""AMD GPUs through amdsmi, the Python package that comes with ROCm.

Written from its documentation and tested with a fake module only, never on a GPU. PCIe throughput
and link errors are NaN: amdsmi has them only for the whole link, or only as a state.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Collection
from typing import Any, Final

from distmon.collect.telemetry.hardware import throttle
from distmon.collect.telemetry.hardware.device_match import ComputeDevice, ListedDevice, bare, match
from distmon.collect.telemetry.hardware.device_queries import (
    DeviceQueries,
    DeviceReader,
    Query,
    QueryFailure,
    error_text,
)
from distmon.collect.telemetry.hardware.reading import OpenResult

_NOT_SUPPORTED: Final = frozenset({2, 3})
"""Not supported, not yet implemented."""
_LOST: Final = frozenset({32, 34})
"""Not initialized, driver not loaded."""

_VIOLATIONS: Final = {
    "active_ppt_pwr": throttle.POWER_CAP,
    "active_prochot_thrm": throttle.HARDWARE_SLOWDOWN,
    "active_socket_thrm": throttle.HARDWARE_THERMAL,
    "active_vr_thrm": throttle.HARDWARE_THERMAL,
    "active_hbm_thrm": throttle.HARDWARE_THERMAL,
}


class AmdReader(DeviceReader):
    """Reads one GPU."""

    def __init__(
        self, smi: Any, listed: ListedDevice, fields: Collection[str] | None = None
    ) -> None:
        queries = DeviceQueries(_queries(smi, listed.handle), _classify_error, fields)
        super().__init__(f"{name_of(smi, listed.handle)} {listed.uuid}", queries)

    def close(self) -> None:
        """Do nothing: `amdsmi_shut_down` would shut the library down for torch too."""


def open_amd(
    wanted: ComputeDevice, smi: Any = None, fields: Collection[str] | None = None
) -> OpenResult:
    """Open a reader of the device that this process uses. `smi` defaults to amdsmi."""
    smi = load_binding() if smi is None else smi
    if isinstance(smi, str):
        return OpenResult(None, smi)
    try:
        smi.amdsmi_init()
        listed = list_devices(smi)
    except Exception as error:
        return OpenResult(None, f"amdsmi cannot be initialized: {error_text(error)}")
    text = None if wanted.uuid is None else spelled_out(wanted.uuid)
    found = match(listed, ComputeDevice(wanted.index, text, wanted.visible, wanted.order_is_bus))
    return (
        OpenResult(None, found)
        if isinstance(found, str)
        else OpenResult(AmdReader(smi, found, fields), None)
    )


def load_binding() -> Any:
    """Return the module `amdsmi`, or one sentence why it cannot be used."""
    try:
        return importlib.import_module("amdsmi")
    except Exception as error:  # it loads its library on import, with errors of many kinds
        return f"the Python package amdsmi, a part of ROCm, cannot be imported: {error_text(error)}"


def list_devices(smi: Any) -> list[ListedDevice]:
    """Return all GPUs with their HIP UUIDs."""
    listed = []
    for handle in smi.amdsmi_get_processor_handles():
        uuid = _hip_uuid(smi, handle)
        listed.append(ListedDevice(uuid, handle, handle, uuid))
    return listed


def name_of(smi: Any, handle: Any) -> str:
    """Return the device model, for messages."""
    with contextlib.suppress(Exception):
        return str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
    return "unnamed device"


def spelled_out(uuid: str) -> str:
    """Return HIP's UUID in amdsmi's form: HIP stores the characters in the UUID's 16 bytes."""
    digits = bare(uuid).replace("-", "")
    with contextlib.suppress(ValueError):
        letters = bytes.fromhex(digits)
        if len(letters) == 16 and letters.isalnum():
            return f"GPU-{letters.decode().lower()}"
    return uuid


def _hip_uuid(smi: Any, handle: Any) -> str:
    """Return the HIP UUID: reported since ROCm 6.4, else derived from the serial number."""
    with contextlib.suppress(Exception):
        return str(smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"])
    serial = str(smi.amdsmi_get_gpu_asic_info(handle)["asic_serial"])
    return f"GPU-{serial.lower().removeprefix('0x')}"


def _classify_error(error: Exception) -> QueryFailure:
    code = getattr(error, "err_code", None)
    if isinstance(error, AttributeError) or code in _NOT_SUPPORTED:
        return QueryFailure.NEVER
    return QueryFailure.LOST if code in _LOST else QueryFailure.NOW


def _queries(smi: Any, handle: Any) -> list[Query]:
    def memory() -> tuple[float, ...]:
        usage = smi.amdsmi_get_gpu_vram_usage(handle)  # in MiB
        return _number(usage["vram_used"]) * 2**20, _number(usage["vram_total"]) * 2**20

    def utilization() -> tuple[float, ...]:
        activity = smi.amdsmi_get_gpu_activity(handle)
        return _number(activity["gfx_activity"]) / 100, _number(activity["umc_activity"]) / 100

    def power() -> tuple[float, ...]:
        info = smi.amdsmi_get_power_info(handle)
        return (_first_number(info.get("current_socket_power"), info.get("average_socket_power")),)

    def power_limit() -> tuple[float, ...]:
        return (_number(smi.amdsmi_get_power_cap_info(handle)["power_cap"]) / 1e6,)

    def temperature(sensor: str) -> Callable[[], tuple[float, ...]]:
        def ask() -> tuple[float, ...]:
            kind = getattr(smi.AmdSmiTemperatureType, sensor)
            now = smi.AmdSmiTemperatureMetric.CURRENT
            return (_number(smi.amdsmi_get_temp_metric(handle, kind, now)),)

        return ask

    def clock(domain: str) -> Callable[[], tuple[float, ...]]:
        def ask() -> tuple[float, ...]:
            info = smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, domain))
            return (_first_number(info.get("clk"), info.get("cur_clk")),)

        return ask

    def throttling() -> tuple[int, ...]:
        status = smi.amdsmi_get_violation_status(handle)
        known = {name: bit for name, bit in _VIOLATIONS.items() if status.get(name) in (0, 1)}
        if not known:
            raise LookupError("amdsmi does not report throttling of this device")
        return (sum({bit for name, bit in known.items() if status[name]}),)

    def ecc() -> tuple[float, ...]:
        counts = smi.amdsmi_get_gpu_total_ecc_count(handle)
        return _number(counts["correctable_count"]), _number(counts["uncorrectable_count"])

    def replays() -> tuple[float, ...]:
        return (_number(smi.amdsmi_get_pcie_info(handle)["pcie_metric"]["pcie_replay_count"]),)

    return [
        Query(("memory_used_bytes", "memory_total_bytes"), memory),
        Query(("gpu_utilization", "memory_utilization"), utilization),
        Query(("power_watts",), power),
        Query(("power_limit_watts",), power_limit),
        Query(("temperature_c",), temperature("HOTSPOT")),
        Query(("memory_temperature_c",), temperature("VRAM")),
        Query(("sm_clock_mhz",), clock("GFX")),
        Query(("memory_clock_mhz",), clock("MEM")),
        Query(("throttle_reasons",), throttling),
        Query(("ecc_corrected", "ecc_uncorrected"), ecc),
        Query(("pcie_replay",), replays),
        Query(("processes",), lambda: (len(smi.amdsmi_get_gpu_process_list(handle)),)),
    ]


def _number(value: Any) -> float:
    """Return NaN for amdsmi's "N/A"."""
    return float(value) if isinstance(value, int | float) else math.nan


def _first_number(*values: Any) -> float:
    return next((n for n in map(_number, values) if not math.isnan(n)), math.nan)

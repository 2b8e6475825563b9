"""AMD GPUs through amdsmi, the Python package that comes with ROCm.

Written from its documentation and run against a stand-in only, never on a GPU. What amdsmi gives
only for the whole link (PCIe traffic) or only as a state (XGMI errors) stays NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable
from typing import Any, Final

from distmon.telemetry.hardware import throttle
from distmon.telemetry.hardware.device_match import ComputeDevice, ListedDevice, bare, match
from distmon.telemetry.hardware.field_by_field import FieldByField, Question, Refusal, in_words
from distmon.telemetry.hardware.reading import HardwareReading, Opened

_NOT_SUPPORTED: Final = frozenset({2, 3})
"""Not supported, not yet implemented."""
_LOST: Final = frozenset({32, 34})
"""Not initialised, driver not loaded."""

_VIOLATIONS: Final = {
    "active_ppt_pwr": throttle.POWER_CAP,
    "active_prochot_thrm": throttle.HARDWARE_SLOWDOWN,
    "active_socket_thrm": throttle.HARDWARE_THERMAL,
    "active_vr_thrm": throttle.HARDWARE_THERMAL,
    "active_hbm_thrm": throttle.HARDWARE_THERMAL,
}


class AmdReader:
    """Reads one GPU."""

    def __init__(self, smi: Any, listed: ListedDevice) -> None:
        self._smi = smi
        self._fields = FieldByField(_questions(smi, listed.handle), _judge)
        self.device = f"{name_of(smi, listed.handle)} {listed.uuid}"

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field."""
        return self._fields.missing

    def read(self) -> HardwareReading:
        """Look once."""
        return self._fields.read()

    def close(self) -> None:
        """Nothing: `amdsmi_shut_down` would take the library away from torch too."""


def open_amd(wanted: ComputeDevice, smi: Any = None) -> Opened:
    """A reader of the device that this process computes on. `smi` is amdsmi unless given."""
    smi = load_binding() if smi is None else smi
    if isinstance(smi, str):
        return Opened(None, smi)
    try:
        smi.amdsmi_init()
        listed = list_devices(smi)
    except Exception as error:
        return Opened(None, f"amdsmi does not start: {in_words(error)}")
    text = None if wanted.uuid is None else spelled_out(wanted.uuid)
    asked = ComputeDevice(wanted.index, text, wanted.visible, wanted.order_is_bus)
    found = match(listed, asked)
    return Opened(None, found) if isinstance(found, str) else Opened(AmdReader(smi, found), None)


def load_binding() -> Any:
    """The module `amdsmi`, or one sentence why it cannot be used."""
    try:
        return importlib.import_module("amdsmi")
    except Exception as error:  # it loads its library on import, with errors of many kinds
        return f"the Python package amdsmi, a part of ROCm, cannot be imported: {in_words(error)}"


def list_devices(smi: Any) -> list[ListedDevice]:
    """All GPUs under the identity that HIP gives them."""
    listed = []
    for handle in smi.amdsmi_get_processor_handles():
        uuid = _hip_uuid(smi, handle)
        listed.append(ListedDevice(uuid, handle, handle, uuid))
    return listed


def name_of(smi: Any, handle: Any) -> str:
    """The model, for people."""
    with contextlib.suppress(Exception):
        return str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
    return "unnamed device"


def spelled_out(uuid: str) -> str:
    """HIP's UUID as amdsmi writes it: HIP puts the letters of the identity into the 16 bytes."""
    digits = bare(uuid).replace("-", "")
    with contextlib.suppress(ValueError):
        letters = bytes.fromhex(digits)
        if len(letters) == 16 and letters.isalnum():
            return f"GPU-{letters.decode().lower()}"
    return uuid


def _hip_uuid(smi: Any, handle: Any) -> str:
    """From ROCm 6.4 on it is told; before, it is made of the serial number of the chip."""
    with contextlib.suppress(Exception):
        return str(smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"])
    serial = str(smi.amdsmi_get_gpu_asic_info(handle)["asic_serial"])
    return f"GPU-{serial.lower().removeprefix('0x')}"


def _judge(error: Exception) -> Refusal:
    code = getattr(error, "err_code", None)
    if isinstance(error, AttributeError) or code in _NOT_SUPPORTED:
        return Refusal.NEVER
    return Refusal.LOST if code in _LOST else Refusal.NOW


def _questions(smi: Any, handle: Any) -> list[Question]:
    def memory() -> tuple[float, ...]:
        usage = smi.amdsmi_get_gpu_vram_usage(handle)  # in MiB
        return _number(usage["vram_used"]) * 2**20, _number(usage["vram_total"]) * 2**20

    def utilisation() -> tuple[float, ...]:
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
            raise LookupError("amdsmi does not know whether the device is throttled")
        return (sum({bit for name, bit in known.items() if status[name]}),)

    def ecc() -> tuple[float, ...]:
        counts = smi.amdsmi_get_gpu_total_ecc_count(handle)
        return _number(counts["correctable_count"]), _number(counts["uncorrectable_count"])

    def replays() -> tuple[float, ...]:
        return (_number(smi.amdsmi_get_pcie_info(handle)["pcie_metric"]["pcie_replay_count"]),)

    return [
        Question(("memory_used_bytes", "memory_total_bytes"), memory),
        Question(("gpu_utilisation", "memory_utilisation"), utilisation),
        Question(("power_watts",), power),
        Question(("power_limit_watts",), power_limit),
        Question(("temperature_c",), temperature("HOTSPOT")),
        Question(("memory_temperature_c",), temperature("VRAM")),
        Question(("sm_clock_mhz",), clock("GFX")),
        Question(("memory_clock_mhz",), clock("MEM")),
        Question(("throttle_reasons",), throttling),
        Question(("ecc_corrected", "ecc_uncorrected"), ecc),
        Question(("pcie_replay",), replays),
        Question(("processes",), lambda: (len(smi.amdsmi_get_gpu_process_list(handle)),)),
    ]


def _number(value: Any) -> float:
    """amdsmi writes "N/A" where it has no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def _first_number(*values: Any) -> float:
    return next((n for n in map(_number, values) if not math.isnan(n)), math.nan)

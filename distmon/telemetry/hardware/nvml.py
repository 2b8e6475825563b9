"""NVIDIA GPUs through NVML, the library of the driver, by the binding of nvidia-ml-py.

Everything here may wait for the driver: it is called from the sampler's thread.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field
from typing import Any

from distmon.telemetry.hardware.device_match import ComputeDevice, ListedDevice, match
from distmon.telemetry.hardware.field_by_field import FieldByField, in_words
from distmon.telemetry.hardware.nvml_fields import judge, questions
from distmon.telemetry.hardware.reading import HardwareReading, Opened

_NEEDED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetUUID", "NVMLError")


class NvmlReader:
    """Reads one GPU or MIG slice."""

    def __init__(self, nvml: Any, listed: ListedDevice) -> None:
        self._nvml = nvml
        self._fields = FieldByField(questions(nvml, listed), judge)
        self.device = f"{name_of(nvml, listed)} {listed.uuid}"

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field."""
        return self._fields.missing

    def read(self) -> HardwareReading:
        """Look once."""
        return self._fields.read()

    def close(self) -> None:
        """Give NVML back; it counts its users, so others in this process keep theirs."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def load_binding() -> Any:
    """The module `pynvml`, or one sentence why it cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return f"the Python package nvidia-ml-py cannot be imported: {error}"
    lacking = [name for name in _NEEDED if not hasattr(nvml, name)]
    if lacking:
        place = getattr(nvml, "__file__", None)
        return (
            f"the module pynvml in {place} is not that of nvidia-ml-py (it has no {lacking[0]}): "
            "remove the package that brought it and install nvidia-ml-py"
        )
    return nvml


def open_nvml(wanted: ComputeDevice, nvml: Any = None) -> Opened:
    """A reader of the device that this process computes on. `nvml` is pynvml unless given."""
    nvml = load_binding() if nvml is None else nvml
    if isinstance(nvml, str):
        return Opened(None, nvml)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Opened(None, f"NVML does not start: {in_words(error)}")
    try:
        reader, reason = _open_started(wanted, nvml)
    except Exception as error:
        reader, reason = None, f"NVML does not list its devices: {in_words(error)}"
    if reader is None:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return Opened(reader, reason)


def _open_started(wanted: ComputeDevice, nvml: Any) -> Opened:
    listing = list_devices(nvml)
    found = match(listing.devices, wanted, silent=len(listing.silent))
    if isinstance(found, str):
        return Opened(None, "; ".join((found, *listing.silent)))
    return Opened(NvmlReader(nvml, found), None)


@dataclass
class Listing:
    """What NVML has: the devices that answer, and a sentence for each that does not."""

    devices: list[ListedDevice] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


def list_devices(nvml: Any) -> Listing:
    """All GPUs and, after each, its MIG slices. One that does not answer spoils no other."""
    listing = Listing()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = as_text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            listing.silent.append(f"GPU {index} of NVML does not answer: {in_words(error)}")
            continue
        bus_id = ""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            bus_id = as_text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        listing.devices.append(ListedDevice(uuid, handle, handle, uuid, bus_id))
        listing.devices += _slices(nvml, listing.devices[-1])
    return listing


def _slices(nvml: Any, board: ListedDevice) -> list[ListedDevice]:
    """The MIG slices of a GPU; one without MIG refuses the question."""
    slices: list[ListedDevice] = []
    try:
        enabled, _pending = nvml.nvmlDeviceGetMigMode(board.handle)
        places = nvml.nvmlDeviceGetMaxMigDeviceCount(board.handle) if enabled else 0
    except (nvml.NVMLError, AttributeError):
        return slices
    for place in range(places):
        with contextlib.suppress(nvml.NVMLError):  # places without a slice
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(board.handle, place)
            uuid = as_text(nvml.nvmlDeviceGetUUID(handle))
            slices.append(ListedDevice(uuid, handle, board.handle, board.uuid, board.bus_id))
    return slices


def name_of(nvml: Any, listed: ListedDevice) -> str:
    """The model, for people."""
    try:
        return as_text(nvml.nvmlDeviceGetName(listed.handle))
    except nvml.NVMLError as error:
        return f"unnamed device ({in_words(error)})"


def as_text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value

"""NVIDIA GPUs through NVML, the driver's management library, by the binding of nvidia-ml-py.

Every function may wait for the driver and is called from the sampler's thread only.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from distmon.collect.telemetry.hardware.device_match import ComputeDevice, ListedDevice, match
from distmon.collect.telemetry.hardware.device_queries import (
    DeviceQueries,
    DeviceReader,
    error_text,
)
from distmon.collect.telemetry.hardware.nvml_fields import classify_error, queries
from distmon.collect.telemetry.hardware.reading import OpenResult

_NEEDED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetUUID", "NVMLError")


class NvmlReader(DeviceReader):
    """Reads one GPU or MIG slice."""

    def __init__(
        self, nvml: Any, listed: ListedDevice, fields: Collection[str] | None = None
    ) -> None:
        """`fields`: those that are read. Each call takes a lock of the driver that all share."""
        of_device = DeviceQueries(queries(nvml, listed), classify_error, fields)
        super().__init__(f"{name_of(nvml, listed)} {listed.uuid}", of_device)
        self._nvml = nvml

    def close(self) -> None:
        """Shut NVML down for this reader; it counts its users, so others are not affected."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def load_binding() -> Any:
    """Return the module `pynvml`, or one sentence why it cannot be used."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return f"the Python package nvidia-ml-py cannot be imported: {error}"
    missing = [name for name in _NEEDED if not hasattr(nvml, name)]
    if missing:
        path = getattr(nvml, "__file__", None)
        return (
            f"the module pynvml in {path} is not that of nvidia-ml-py (it has no {missing[0]}): "
            "uninstall the package that contains it and install nvidia-ml-py"
        )
    return nvml


def open_nvml(
    wanted: ComputeDevice, nvml: Any = None, fields: Collection[str] | None = None
) -> OpenResult:
    """Open a reader of the device that this process uses. `nvml` defaults to pynvml."""
    nvml = load_binding() if nvml is None else nvml
    if isinstance(nvml, str):
        return OpenResult(None, nvml)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return OpenResult(None, f"NVML cannot be initialized: {error_text(error)}")
    try:
        reader, reason = _open_initialized(wanted, nvml, fields)
    except Exception as error:
        reader, reason = None, f"NVML cannot list its devices: {error_text(error)}"
    if reader is None:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return OpenResult(reader, reason)


def _open_initialized(
    wanted: ComputeDevice, nvml: Any, fields: Collection[str] | None
) -> OpenResult:
    listing = list_devices(nvml)
    found = match(listing.devices, wanted, unresponsive=len(listing.unresponsive))
    if isinstance(found, str):
        return OpenResult(None, "; ".join((found, *listing.unresponsive)))
    return OpenResult(NvmlReader(nvml, found, fields), None)


@dataclass
class Listing:
    """The devices that NVML lists, and a sentence for each that does not respond."""

    devices: list[ListedDevice] = field(default_factory=list)
    unresponsive: list[str] = field(default_factory=list)


def list_devices(nvml: Any) -> Listing:
    """List all GPUs, each followed by its MIG slices; skip those that do not respond."""
    listing = Listing()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = as_text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            listing.unresponsive.append(
                f"GPU {index} of NVML does not respond: {error_text(error)}"
            )
            continue
        bus_id = ""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            bus_id = as_text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        listing.devices.append(ListedDevice(uuid, handle, handle, uuid, bus_id))
        listing.devices += _slices(nvml, listing.devices[-1])
    return listing


def _slices(nvml: Any, board: ListedDevice) -> list[ListedDevice]:
    """Return the MIG slices of a GPU; NVML raises for a GPU without MIG."""
    slices: list[ListedDevice] = []
    try:
        enabled, _pending = nvml.nvmlDeviceGetMigMode(board.handle)
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(board.handle) if enabled else 0
    except (nvml.NVMLError, AttributeError):
        return slices
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError):  # an index without a slice
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(board.handle, index)
            uuid = as_text(nvml.nvmlDeviceGetUUID(handle))
            slices.append(ListedDevice(uuid, handle, board.handle, board.uuid, board.bus_id))
    return slices


def name_of(nvml: Any, listed: ListedDevice) -> str:
    """Return the device model, for messages."""
    try:
        return as_text(nvml.nvmlDeviceGetName(listed.handle))
    except nvml.NVMLError as error:
        return f"unnamed device ({error_text(error)})"


def as_text(value: str | bytes) -> str:
    """Return a string; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value

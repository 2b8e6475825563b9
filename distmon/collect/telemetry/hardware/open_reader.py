"""Choose the reader of a torch device, and describe all devices for `distmon doctor`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distmon.collect.telemetry.hardware import amd, nvml
from distmon.collect.telemetry.hardware.device_match import ListedDevice, compute_device
from distmon.collect.telemetry.hardware.device_queries import error_text
from distmon.collect.telemetry.hardware.reading import HardwareReading, OpenReader


def opener_for(
    device: torch.device,
    environ: Mapping[str, str],
    properties_of: Callable[[torch.device], object] = torch.cuda.get_device_properties,
    is_amd: bool = torch.version.hip is not None,
    fields: Collection[str] | None = None,
) -> OpenReader | None:
    """Return a function that opens the reader of `device`; None for a device without one.

    `fields` of the reading are read, and no others; None: all.

    This function queries torch and must run in the thread that uses the device; the returned one
    waits for the driver and must run in the sampler's thread.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    wanted = compute_device(index, properties_of(device), environ, is_amd)
    return functools.partial(amd.open_amd if is_amd else nvml.open_nvml, wanted, fields=fields)


@dataclass(frozen=True)
class DeviceDescription:
    """One device, or a vendor's library with a `problem` if it lists no devices."""

    name: str
    uuid: str = ""
    driver: str = ""
    memory_bytes: float = float("nan")
    missing: dict[str, str] = field(default_factory=dict)
    """Fields that this device does not report, and why."""
    problem: str | None = None


def describe_devices(nvml_module: Any = None, amdsmi_module: Any = None) -> list[DeviceDescription]:
    """Return all devices that the management libraries list, each read once. Waits for the driver.

    NVIDIA's library is always tried, AMD's only where amdsmi is installed. The modules default to
    the installed ones.
    """
    return [*_nvidia(nvml_module), *_amd(amdsmi_module)]


def _nvidia(module: Any) -> Iterator[DeviceDescription]:
    module = nvml.load_binding() if module is None else module
    if isinstance(module, str):
        yield DeviceDescription("NVML", problem=module)
        return
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        yield DeviceDescription("NVML", problem=f"NVML cannot be initialized: {error_text(error)}")
        return
    try:
        driver = nvml.as_text(module.nvmlSystemGetDriverVersion())
        listing = nvml.list_devices(module)
        for listed in listing.devices:
            yield _described(nvml.NvmlReader(module, listed), listed, driver)
        for sentence in listing.unresponsive:
            yield DeviceDescription("NVML", driver=driver, problem=sentence)
    except module.NVMLError as error:
        yield DeviceDescription("NVML", problem=error_text(error))
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


def _amd(module: Any) -> Iterator[DeviceDescription]:
    module = amd.load_binding() if module is None else module
    if isinstance(module, str):
        return
    try:
        module.amdsmi_init()
        for listed in amd.list_devices(module):
            driver = str(module.amdsmi_get_gpu_driver_info(listed.handle)["driver_version"])
            yield _described(amd.AmdReader(module, listed), listed, driver)
    except Exception as error:
        yield DeviceDescription("amdsmi", problem=error_text(error))


def _described(
    reader: nvml.NvmlReader | amd.AmdReader, listed: ListedDevice, driver: str
) -> DeviceDescription:
    reading: HardwareReading = reader.read()
    return DeviceDescription(
        name=reader.device.removesuffix(f" {listed.uuid}"),
        uuid=listed.uuid,
        driver=driver,
        memory_bytes=reading.memory_total_bytes,
        missing=reader.missing,
        problem=reading.problem,
    )

"""Which reader a torch device needs, and what `distmon doctor` tells of the devices here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distmon.telemetry.hardware import amd, nvml
from distmon.telemetry.hardware.device_match import ListedDevice, compute_device
from distmon.telemetry.hardware.field_by_field import in_words
from distmon.telemetry.hardware.reading import HardwareReading, OpenReader


def opener_for(
    device: torch.device,
    environ: Mapping[str, str],
    properties_of: Callable[[torch.device], object] = torch.cuda.get_device_properties,
    is_amd: bool = torch.version.hip is not None,
) -> OpenReader | None:
    """How to open the reader of `device`, for `HardwareSampler`; None where there is none to read.

    Asks torch for the UUID, which is for the thread that uses the device; what it returns waits
    for the driver and is for the sampler's thread.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    wanted = compute_device(index, properties_of(device), environ, is_amd)
    return functools.partial(amd.open_amd if is_amd else nvml.open_nvml, wanted)


@dataclass(frozen=True)
class DeviceDescription:
    """One device, or the library of a vendor when `problem` says why it lists nothing."""

    name: str
    uuid: str = ""
    driver: str = ""
    memory_bytes: float = float("nan")
    missing: dict[str, str] = field(default_factory=dict)
    """Fields of a reading that this device does not give here, and why."""
    problem: str | None = None


def describe_devices(nvml_module: Any = None, amdsmi_module: Any = None) -> list[DeviceDescription]:
    """All devices that the management libraries list, each read once; it waits for the driver.

    NVIDIA's library is always looked for, AMD's only where amdsmi is installed. The modules are
    the installed ones unless given.
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
        yield DeviceDescription("NVML", problem=f"NVML does not start: {in_words(error)}")
        return
    try:
        driver = nvml.as_text(module.nvmlSystemGetDriverVersion())
        listing = nvml.list_devices(module)
        for listed in listing.devices:
            yield _described(nvml.NvmlReader(module, listed), listed, driver)
        for sentence in listing.silent:
            yield DeviceDescription("NVML", driver=driver, problem=sentence)
    except module.NVMLError as error:
        yield DeviceDescription("NVML", problem=in_words(error))
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
        yield DeviceDescription("amdsmi", problem=in_words(error))


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

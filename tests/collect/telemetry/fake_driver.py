"""The real pynvml on a copy of the fake library (`fake_nvml.c`) that a test has for itself."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from distmon.collect.telemetry.hardware.device_match import ComputeDevice
from distmon.collect.telemetry.hardware.nvml import open_nvml
from distmon.collect.telemetry.hardware.reading import HardwareReader

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build_library(target: Path, *flags: str) -> Path:
    """Compile the fake library."""
    command = ["gcc", "-shared", "-fPIC", "-O0", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([*command, "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target


def uuid_of(number: int) -> str:
    """UUID of the fake GPU `number`, without prefix, as torch gives it."""
    return f"{number:x}a000000-0000-0000-0000-00000000000{number:x}"


def gpu(number: int, **changes: object) -> str:
    """A line for a GPU whose values all tell its number; None takes a value away."""
    values: dict[str, object] = {
        "uuid": f"GPU-{uuid_of(number)}",
        "name": f"Fake-{number}",
        "bus": f"00000000:{number + 1:02X}:00.0",
        "used": (number + 1) << 30,
        "total": (number + 1) << 33,
        "busy": 90 + number,
        "traffic": 40 + number,
        "power": 300_000 + number,
        "limit": 700_000 + number,
        "heat": 60 + number,
        "f82": 70 + number,
        "sm": 1900 + number,
        "mem": 2600 + number,
        "throttle": 1 << number,
        "corrected": 10 + number,
        "lost_bits": number,
        "replay": 20 + number,
        "tx": 500 + number,
        "rx": 800 + number,
        "links": 2,
        "f38": 1 + number,
        "f45": 10,
        "f52": 100,
        "procs": 1 + number,
    }
    values |= changes
    return "gpu " + " ".join(f"{key}={value}" for key, value in values.items() if value is not None)


class FakeDriver:
    """`nvml` is a pynvml module of its own; `write` says what the driver answers from now on."""

    def __init__(self, library: Path, nvml: ModuleType) -> None:
        self.library = library
        self.nvml = nvml

    def write(self, *lines: str) -> None:
        # Replaced as a whole: the library may be reading it in another thread.
        new = self.library.with_suffix(".new")
        new.write_text("\n".join(("driver 560.35.03", *lines, "")))
        new.replace(f"{self.library}.conf")

    def open(self, number: int = 0) -> HardwareReader:
        """The reader of GPU `number`, found by its UUID."""
        reader, reason = open_nvml(wanted(uuid=uuid_of(number)), self.nvml)
        assert reader is not None, reason
        return reader


def wanted(
    index: int = 0,
    uuid: str | None = None,
    visible: str | None = None,
    order_is_bus: bool = False,
) -> ComputeDevice:
    return ComputeDevice(index, uuid, visible, order_is_bus)


def bind(library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A second pynvml, from the installed source, that has `library` loaded already."""
    name = "pynvml_on_the_fake_driver"
    spec = importlib.util.spec_from_file_location(name, pynvml.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "nvmlLib", ctypes.CDLL(str(library)))
    return FakeDriver(library, module)


def own_copy(library: Path, folder: Path) -> Path:
    """Its variables are shared by all who load the same file, so each test loads its own."""
    return Path(shutil.copy(library, folder / "libnvidia-ml.so.1"))

"""`distmon doctor`: versions, devices, backends and extras, and what works with them."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "absent", "fails"]
_MARKS = {"ok": ("ok", "green"), "absent": ("--", "yellow"), "fails": ("fails", "red")}
_EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "deepspeed": "deepspeed",
    "apprise": "alerts",
    "prometheus_client": "prometheus",
    "plotly": "report",
    "starlette": "report",
    "transformers": "hf",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "matplotlib": "bench",
}
"""Module to import, and the extra that installs it."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    what: str
    verdict: Verdict
    detail: str


def examine() -> list[Finding]:
    """Run all checks; a check that raises becomes a line with the error."""
    findings: list[Finding] = []
    for check in (_versions, _devices, _triton, _native, _hardware, _mfu, _collectives, _extras):
        findings += _guarded(check)
    return findings


def print_findings(console: Console) -> None:
    """Print the table."""
    table = Table(title="distmon doctor", show_lines=False)
    table.add_column("component")
    table.add_column("")
    table.add_column("detail", overflow="fold")
    for finding in examine():
        table.add_row(finding.what, Text(*_MARKS[finding.verdict]), Text(finding.detail))
    console.print(table)


def findings_as_json() -> str:
    """Return the findings as a JSON array of objects."""
    return json.dumps([asdict(finding) for finding in examine()], indent=2)


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return [*check()]
    except Exception as error:
        name = check.__name__.strip("_")
        return [Finding(name, "fails", f"{type(error).__name__}: {error}")]


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for package in ("distmon", "torch", "triton", "pydantic", "pyarrow", "nvidia-ml-py"):
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "absent", f"pip install {package}")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "no GPU is visible"
        if torch.version.hip is not None:
            build = "this torch is a ROCm build, but no GPU is visible"
        yield Finding("accelerator", "absent", f"{build}: samples are read on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        yield Finding(f"cuda:{index}", "ok", f"{properties.name}, {memory:.0f} GiB")


def _triton() -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        yield Finding("triton backend", "absent", "triton is not installed (Linux only)")
    elif not torch.cuda.is_available():
        yield Finding("triton backend", "absent", "needs a CUDA or ROCm device")
    else:
        yield Finding("triton backend", "ok", "chosen by `backend: auto`")
    yield Finding(
        "torch backend", "ok", "runs on any device; the default on CPU without the native module"
    )


def _native() -> Iterator[Finding]:
    from distmon.native import status

    found = status()
    if found.module is not None:
        yield Finding("native module", "ok", f"chosen by `backend: auto` on CPU; {found.path}")
    else:
        verdict: Verdict = "absent" if found.path is None else "fails"
        yield Finding("native module", verdict, f"{found.reason}; the torch backend is used")


def _hardware() -> Iterator[Finding]:
    from distmon.collect.telemetry.hardware import describe_devices

    for device in describe_devices():
        if device.problem is not None:
            detail = f"{device.problem}: memory, power and clocks are not recorded"
            yield Finding(device.name, "absent", detail)
            continue
        memory = f"{device.memory_bytes / 2**30:.0f} GiB"
        detail = f"{device.uuid}, driver {device.driver}, {memory}"
        if device.missing:
            detail += f"; not available: {', '.join(device.missing)}"
        yield Finding(device.name, "ok", detail)


def _mfu() -> Iterator[Finding]:
    """Yield the peak FLOP/s of each device model, or why MFU needs `mfu.peak_flops`."""
    from distmon.collect.telemetry.mfu.peaks import resolve_peak
    from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names: list[str | None] = [*{torch.cuda.get_device_name(index) for index in range(count)}]
    for name in names or [None]:
        try:
            yield Finding("MFU", "ok", f"{name}: {resolve_peak(name, 'bf16').describe()}")
        except MfuUnavailableError as error:
            yield Finding("MFU", "absent", str(error))


def _collectives() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("torch.distributed", "absent", "not in this build of torch: one process only")
        return
    have = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    yield Finding("torch.distributed", "ok", f"backends {', '.join(have)}")


def _extras() -> Iterator[Finding]:
    for module, extra in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(f"extra {extra}", "absent", f"pip install 'distmon[{extra}]'")
        else:
            # A package may have another name than its module, as mlflow-skinny has.
            packages = packages_distributions().get(module, [module])
            yield Finding(f"extra {extra}", "ok", version(packages[0]))

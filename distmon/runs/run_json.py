"""`run.json` and standard JSON: what is written, and what is read back."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from distmon.errors import RunFolderError
from distmon.runs.entries import run_info
from distmon.untrusted.documents import parse_json
from distmon.untrusted.files import (
    is_file,
    is_folder,
    read_regular,
)
from distmon.untrusted.values import Dropped

RUN_FILE: Final = "run.json"
LARGEST_INFO: Final = 256 << 20
"""Bytes of `run.json`: 100 000 parameters take 15 MB."""


def read_info(folder: Path, problems: list[str] | None = None) -> dict[str, Any]:
    """Return the content of `run.json`; raise RunFolderError when it is missing or invalid.

    `problems` gets a sentence about values that had to be left out.
    """
    target = folder / RUN_FILE
    if not is_folder(folder):
        what = "is a file" if is_file(folder) else "does not exist"
        raise RunFolderError(f"{folder} is not a run folder: it {what}")
    try:
        content = parse_json(read_regular(target, LARGEST_INFO, follow_links=False))
    except FileNotFoundError:
        raise RunFolderError(f"{folder} is not a run folder: it has no {RUN_FILE}") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {target}: {error.strerror or error}") from None
    except ValueError as error:
        raise RunFolderError(
            f"{target} is not valid JSON ({error}); restore it or use another folder"
        ) from None
    dropped = Dropped()
    info = run_info(content, str(target), dropped)
    if problems is not None:
        problems += dropped.sentence(RUN_FILE)
    return info


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: NaN and infinities become null, unknown objects their `str`."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def readable_json(info: Mapping[str, Any]) -> str:
    """Return JSON with a line for each key, and for each parameter.

    Indenting everything would take Python 30 us and five lines for each of 100 000 parameters.
    """
    lines = []
    for key, value in info.items():
        if key == "parameters" and value:
            entries = ",\n    ".join(json.dumps(entry, default=str) for entry in value)
            text = f"[\n    {entries}\n  ]"
        else:
            text = strict_json(value, indent=2).replace("\n", "\n  ")
        lines.append(f"  {json.dumps(str(key))}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, platform and the packages that affect the run."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("distmon", "torch", "triton", "numpy", "pyarrow"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

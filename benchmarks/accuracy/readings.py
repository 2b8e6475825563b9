"""Readings: one number of the monitor beside its truth, with the conditions; and their CSV file."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

TOTAL: Final = "total"
"""Stands for a parameter's name and kind where a number is over all parameters."""
PACKAGES: Final = ("distmon", "transformers", "numpy")


@dataclass(frozen=True)
class Reading:
    """One number of the monitor at one observation."""

    family: str
    dtype: str
    batch: int
    """Tokens in the batch."""
    stage: str
    """`start` or `trained`."""
    mode: str
    """The monitor's `sample_size`."""
    step: int
    """Step since the beginning of the stage, from 1."""
    parameter: str
    kind: str
    elements: int
    quantity: str
    truth: float
    estimate: float
    stderr: float


@dataclass(frozen=True)
class Arrays:
    """The numbers of some readings, in one array each."""

    truth: NDArray[np.float64]
    estimate: NDArray[np.float64]
    stderr: NDArray[np.float64]

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Self:
        """Collect the numbers of `readings`."""
        return cls(
            *(np.array([getattr(r, f.name) for r in readings], dtype=float) for f in fields(cls))
        )


def groups(readings: Iterable[Reading], key: Callable[[Reading], Any]) -> dict[Any, list[Reading]]:
    """Return the readings by key, in the order in which the keys appear."""
    found: dict[Any, list[Reading]] = {}
    for reading in readings:
        found.setdefault(key(reading), []).append(reading)
    return found


def write_csv(path: Path, readings: Iterable[Reading], conditions: Mapping[str, str]) -> None:
    """Write one line per reading; the conditions are repeated in every line."""
    names = [f.name for f in fields(Reading)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *conditions])
        writer.writeheader()
        writer.writerows(asdict(reading) | dict(conditions) for reading in readings)


def read_csv(path: Path) -> Iterator[Reading]:
    """Yield the readings of a file that `write_csv` wrote."""
    convert: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            yield Reading(*(convert[str(f.type)](line[f.name]) for f in fields(Reading)))


def read_conditions(path: Path) -> dict[str, str]:
    """Return the conditions in a file that `write_csv` wrote; empty when it has no reading."""
    with path.open(newline="") as file:
        first: dict[str, str] = next(csv.DictReader(file), {})
    return {name: first[name] for name in [*first][len(fields(Reading)) :]}


def conditions(seed: int, interval: int) -> dict[str, str]:
    """Return what all readings of this run have in common."""
    return {
        "torch": torch.__version__,
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "seed": str(seed),
        "interval": str(interval),
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of this checkout, marked when files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return "unknown"
    return found.stdout.strip() or "unknown"

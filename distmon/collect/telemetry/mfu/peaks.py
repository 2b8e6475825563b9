"""The peak FLOP/s of a device: from the user, from a table by exact name, or measured.

The table is `peaks.csv`: dense rates in TFLOP/s by dtype, with a source for each row. Names must
match exactly, because prefixes mislead: an L40S is not an L4.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from typing import Any

from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError

PEAK_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
# `1g.5gb`, `1g.10gb+me`, and `1c.3g.20gb` where a compute instance has 1 of the 3 slices.
_MIG_SLICE = re.compile(r"(?P<parent>.+?) mig (?:(?P<compute>\d+)c\.)?(?P<gpu>\d+)g\.\d+gb\S*")


@dataclass(frozen=True)
class Peak:
    """The peak rate of one device."""

    flops: float
    """Dense FLOP/s."""
    dtype: str | None
    """One of PEAK_DTYPES; None when the user gave a number without a dtype."""
    source: str
    """Source of the number."""

    def describe(self) -> str:
        """Return a text such as `989.4 TFLOP/s (bf16 dense, NVIDIA H100 whitepaper (SXM5))`."""
        kind = f"{self.dtype} dense, " if self.dtype else ""
        return f"{self.flops / 1e12:.4g} TFLOP/s ({kind}{self.source})"


@dataclass(frozen=True)
class PeakRow:
    """One device of the table."""

    device: str
    """Name from `torch.cuda.get_device_name()`."""
    aliases: tuple[str, ...]
    tflops: Mapping[str, float]
    """Dense TFLOP/s by dtype, without dtypes that the device does not accelerate."""
    mig_slices: int | None
    """Number of MIG compute slices; None when the device does not support MIG."""
    source: str
    note: str


class PeakTable:
    """Looks up peaks by exact device name, ignoring case, spacing and the NVIDIA prefix."""

    def __init__(self, rows: Iterable[PeakRow]) -> None:
        self._by_name: dict[str, PeakRow] = {}
        for row in rows:
            _check(row)
            for name in (row.device, *row.aliases):
                if self._by_name.setdefault(normalize_name(name), row) is not row:
                    raise ValueError(f"two rows of the peak table have the name {name}")

    @classmethod
    def shipped(cls) -> PeakTable:
        """Return the table in the package."""
        text = (files(__package__) / "peaks.csv").read_text(encoding="utf-8")
        return cls(_row(fields) for fields in csv.DictReader(text.splitlines()))

    @property
    def rows(self) -> tuple[PeakRow, ...]:
        """Every device once."""
        return tuple({id(row): row for row in self._by_name.values()}.values())

    def find(self, device_name: str, dtype: str) -> Peak:
        """Return the peak of a device; raise MfuUnavailableError if there is none."""
        name = normalize_name(device_name)
        row = self._by_name.get(name)
        slices = None
        if row is None and (match := _MIG_SLICE.fullmatch(name)):
            row = self._by_name.get(match["parent"])
            slices = int(match["compute"] or match["gpu"])
        if row is None:
            raise MfuUnavailableError(
                f'no MFU: the peak of "{device_name}" is not in the table; '
                "set mfu.peak_flops, or mfu.measure_peak"
            )
        if dtype not in row.tflops:
            raise MfuUnavailableError(
                f'no MFU: the table has no {dtype} peak of "{device_name}", only '
                f"{', '.join(row.tflops)}; set mfu.peak_flops"
            )
        flops = row.tflops[dtype] * 1e12
        source = f"{row.source}; {row.note}" if row.note else row.source
        if slices is None:
            return Peak(flops, dtype, source)
        if row.mig_slices is None or not 1 <= slices <= row.mig_slices:
            raise MfuUnavailableError(
                f'no MFU: "{device_name}" is not a known MIG slice of {row.device}; '
                "set mfu.peak_flops"
            )
        return Peak(
            flops * slices / row.mig_slices,
            dtype,
            f"{slices} of {row.mig_slices} slices of {row.device}, {source}",
        )


def normalize_name(device_name: str) -> str:
    """Return the name without case, spacing, trademarks and `NVIDIA`, which vary by driver."""
    plain = re.sub(r"\((?:r|tm)\)|[®™]", "", device_name, flags=re.IGNORECASE)
    return " ".join(plain.casefold().split()).removeprefix("nvidia ")


def resolve_peak(
    device_name: str | None,
    dtype: str | None,
    given: float | None = None,
    measure: Callable[[], Peak] | None = None,
    table: PeakTable | None = None,
) -> Peak:
    """Return the user's number, else the table's, else the measured one.

    `device_name` is None without an accelerator. `measure` is called only when the table has no
    entry; it is None unless the user enabled it. Raises MfuUnavailableError when there is no peak.
    """
    if given is not None:
        if not (isfinite(given) and given > 0):
            raise MfuUnavailableError(f"mfu.peak_flops must be a positive number, not {given}")
        return Peak(given, dtype, "given by the user")
    if dtype not in PEAK_DTYPES:
        raise MfuUnavailableError(
            f"no MFU: there is no peak for the dtype {dtype}; set mfu.dtype to one of "
            f"{', '.join(PEAK_DTYPES)}, or mfu.peak_flops"
        )
    if device_name is None:
        reason = MfuUnavailableError(
            "no MFU: the peak table has no CPUs; set mfu.peak_flops, or mfu.measure_peak"
        )
    else:
        try:
            return (table or PeakTable.shipped()).find(device_name, dtype)
        except MfuUnavailableError as error:
            reason = error
    if measure is None:
        raise reason
    return measure()


def _row(fields: Mapping[str, Any]) -> PeakRow:
    slices = fields["mig_slices"]
    return PeakRow(
        device=fields["device"],
        aliases=tuple(name for name in fields["aliases"].split("|") if name),
        tflops={dtype: float(fields[dtype]) for dtype in PEAK_DTYPES if fields[dtype]},
        mig_slices=int(slices) if slices else None,
        source=fields["source"],
        note=fields["note"],
    )


def _check(row: PeakRow) -> None:
    """Raise ValueError for a row that would lead to a wrong MFU."""
    if not row.tflops or not row.source:
        raise ValueError(f"the row of {row.device} in the peak table needs a number and a source")
    for dtype, value in row.tflops.items():
        if dtype not in PEAK_DTYPES or not (isfinite(value) and value > 0):
            raise ValueError(f"bad {dtype} peak of {row.device} in the peak table: {value}")

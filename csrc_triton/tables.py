"""The device tables that hold where every parameter lies.

ADDRESS_COLUMNS change when tensors move and are refreshed by one copy; the rest is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from csrc_triton.address_layout import ADDRESS, ADDRESS_COLUMNS
from csrc_triton.row_layout import BIN_WORDS, BINS, GROUPS, MAX_COLUMNS, SUM_COLUMNS

A_COLUMNS: tl.constexpr = tl.constexpr(len(ADDRESS_COLUMNS))
A_WEIGHT: tl.constexpr = tl.constexpr(ADDRESS["weight"])
A_WEIGHT_CODE: tl.constexpr = tl.constexpr(ADDRESS["weight_code"])
A_WEIGHT_OFFSETS: tl.constexpr = tl.constexpr(ADDRESS["weight_offsets"])
A_GRAD: tl.constexpr = tl.constexpr(ADDRESS["grad"])
A_GRAD_CODE: tl.constexpr = tl.constexpr(ADDRESS["grad_code"])
A_GRAD_OFFSETS: tl.constexpr = tl.constexpr(ADDRESS["grad_offsets"])

VALUE_TYPES: Final[dict[torch.dtype, tl.dtype]] = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
OFFSET_TYPES: Final[dict[torch.dtype, tl.dtype]] = {torch.int32: tl.int32, torch.int64: tl.int64}

MAX_BLOCK_WIDTH: Final = 128
"""A [GROUPS, 128] tile is the default sample of 1024 in one pass: 8 elements per thread."""
SAMPLED_WARPS: Final = 4


def check(
    what: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Raise a sentence that names the table unless it is what a kernel will assume it is."""
    if tensor.device != device:
        raise ValueError(f"{what} is on {tensor.device}, the tables are on {device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{what} must be {dtype}, not {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{what} must have shape {shape}, not {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous")


def block_width(widest: int) -> int:
    """Columns of a tile for rows of up to `widest` slots per group: a power of two from 16 on."""
    width = 16
    while width < min(widest, MAX_BLOCK_WIDTH):
        width *= 2
    return width


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` that is queued, not waited for; only pinned memory allows that."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def cut_into_chunks(
    sizes: Sequence[int], chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut tensors of these sizes into chunks.

    Returns the tensor of each chunk, int32 [chunks], and the first chunk of each tensor,
    int64 [tensors + 1].
    """
    per_tensor = (torch.tensor(sizes, dtype=torch.int64) + chunk - 1) // chunk
    first = torch.cat((torch.zeros(1, dtype=torch.int64), per_tensor.cumsum(0)))
    tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), per_tensor)
    return upload(tensors, device), upload(first, device)


@dataclass(frozen=True)
class RowTables:
    """Where the samples of every parameter lie. Row i of each table is parameter i."""

    addresses: torch.Tensor
    """int64 [parameters, ADDRESS_COLUMNS]"""
    starts: torch.Tensor
    """int64 [parameters]: first slot of the row in `snapshot`."""
    widths: torch.Tensor
    """int32 [parameters]: slots of each of the row's GROUPS groups; 0 when nothing is here."""
    group_counts: torch.Tensor
    """int32 [parameters, GROUPS]: used slots of each group; they come first."""
    half_ulp: torch.Tensor
    """float64 [parameters]"""
    snapshot: torch.Tensor
    """float32 or float64, flat."""
    offset_dtype: torch.dtype
    """int32 or int64: what the addresses in the offset columns point to."""
    widest: int
    """The largest of `widths`."""

    def __post_init__(self) -> None:
        n, device = len(self.addresses), self.addresses.device
        check("addresses", self.addresses, torch.int64, (n, len(ADDRESS_COLUMNS)), device)
        check("starts", self.starts, torch.int64, (n,), device)
        check("widths", self.widths, torch.int32, (n,), device)
        check("group_counts", self.group_counts, torch.int32, (n, GROUPS), device)
        check("half_ulp", self.half_ulp, torch.float64, (n,), device)
        if self.snapshot.dtype not in VALUE_TYPES:
            raise TypeError(f"snapshot must be float32 or float64, not {self.snapshot.dtype}")
        check(
            "snapshot", self.snapshot, self.snapshot.dtype, tuple(self.snapshot.shape[:1]), device
        )
        if self.offset_dtype not in OFFSET_TYPES:
            raise TypeError(f"offsets must be int32 or int64, not {self.offset_dtype}")

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def device(self) -> torch.device:
        return self.addresses.device


@dataclass(frozen=True)
class RowOutputs:
    """What the statistics kernels fill."""

    sums: torch.Tensor
    """float64 [parameters, SUM_COLUMNS]"""
    maxima: torch.Tensor
    """float32 [parameters, MAX_COLUMNS]"""
    bins: torch.Tensor | None
    """float64 [parameters, words]: packed counts of BINS bins; None for no histogram."""
    checksums: torch.Tensor
    """int64 [parameters]"""

    @property
    def words(self) -> int:
        """Words that the bins of a row are packed into; 0 for no histogram."""
        return 0 if self.bins is None else self.bins.shape[-1]

    def verify(self, rows: int, device: torch.device) -> None:
        """Raise unless every table has `rows` rows of the right kind on `device`."""
        check("sums", self.sums, torch.float64, (rows, len(SUM_COLUMNS)), device)
        check("maxima", self.maxima, torch.float32, (rows, len(MAX_COLUMNS)), device)
        check("checksums", self.checksums, torch.int64, (rows,), device)
        if self.bins is not None:
            words = self.words if self.words in BIN_WORDS else BINS
            check("bins", self.bins, torch.float64, (rows, words), device)


def verify_launch(
    addresses: torch.Tensor,
    applied: torch.Tensor,
    outputs: RowOutputs,
    value_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless these are what a kernel that fills columns of rows will assume they are."""
    rows = len(addresses)
    verify_addresses(addresses, value_dtype, device)
    check("applied", applied, torch.float64, (rows,), device)
    outputs.verify(rows, device)


def verify_addresses(
    addresses: torch.Tensor, value_dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless this is an address table, and the type in which its values are read is one."""
    shape = (len(addresses), A_COLUMNS.value)
    check("addresses", addresses, torch.int64, shape, device)
    if value_dtype not in VALUE_TYPES:
        raise TypeError(f"value_dtype must be float32 or float64, not {value_dtype}")


def register_limit(registers: int) -> dict[str, int]:
    """Return the option of a launch that limits registers; the compiler for AMD has none."""
    return {} if torch.version.hip else {"maxnreg": registers}

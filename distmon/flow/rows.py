"""The row of a block: what the gradients at both its ends have added up to, on the device."""

from __future__ import annotations

from typing import Any

import torch

from distmon.native import NativeModule

INPUT, OUTPUT = 0, 1


class Switch:
    """Whether gradients are added up now. Shared by the blocks of one monitor."""

    def __init__(self, native: NativeModule | None = None) -> None:
        """`native` adds up gradients on the CPU in a tenth of the time."""
        self.armed = False
        self.native = native
        self.fault: Exception | None = None
        """The newest thing that went wrong; training knows nothing of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The hooks of a copied model belong to no monitor, so theirs stays off."""
        return Switch, ()


def new_row(device: torch.device, switch: Switch) -> torch.Tensor:
    """`row[side]` is the root of the sum of squared norms, and how many there were."""
    row = torch.zeros((2, 2), dtype=torch.float64, device=device)
    row.switch = switch  # type: ignore[attr-defined]
    # CUDA graphs would write into a copy of their own.
    torch._dynamo.mark_static_address(row)
    return row


def add_norm(part: torch.Tensor, row: torch.Tensor, side: int, copies: int) -> None:
    """Add the norm of a gradient, of which `copies` ranks hold the same part."""
    switch: Switch | None = getattr(row, "switch", None)
    # What a CUDA graph does not record it will never do.
    recorded = part.is_cuda and torch.cuda.is_current_stream_capturing()
    if switch is None or not (switch.armed or recorded):
        return
    try:
        add(row, side, norm_of(part, copies))
    except Exception as error:
        switch.fault = error


def norm_of(part: torch.Tensor, copies: int) -> torch.Tensor:
    """What a gradient adds, of which `copies` ranks hold the same part."""
    wide = torch.promote_types(part.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=wide)
    return norm / copies**0.5 if copies > 1 else norm


def add(row: torch.Tensor, side: int, norm: torch.Tensor) -> None:
    """Add a norm to one side of a row."""
    # `data` has a version of its own: autograd may have saved the row for a compiled graph.
    cells = row.data[side]
    cells[0].hypot_(norm)
    cells[1].add_(1)

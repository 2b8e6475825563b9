"""The row of a block: the summed gradient norms at both its ends, on the device."""

from __future__ import annotations

from typing import Any

import torch

from distmon.device import is_capturing, widest_float
from distmon.native import GainHooks, NativeModule

INPUT, OUTPUT = 0, 1


class Switch:
    """Whether gradients are measured now. Shared by the blocks of one monitor."""

    def __init__(self, native: NativeModule | None = None) -> None:
        """`native` computes norms on the CPU in a tenth of the time."""
        self.armed = False
        """Whether gradients are measured now; set it by `arm`."""
        self.native = native
        self.compiled: GainHooks | None = None
        """Hooks that run without the interpreter, on a CPU; they have rows of their own."""
        self.fault: Exception | None = None
        """The newest failure of a hook; it does not reach the training."""
        self.seconds = 0.0
        """Time that the hooks in Python took so far."""
        self.written = True
        """Whether a row may hold numbers; compiled hooks have rows of their own."""

    def arm(self, armed: bool) -> None:
        """Measure gradients from now on, or ignore them."""
        self.armed = armed
        if self.compiled is not None:
            self.compiled.arm(armed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a switch that stays off: the hooks of a copied model belong to no monitor."""
        return Switch, ()


def new_row(device: torch.device, switch: Switch) -> torch.Tensor:
    """Return zeros; `row[side]` is the root of the sum of squared norms, and their count."""
    row = torch.zeros((2, 2), dtype=widest_float(device), device=device)
    row.switch = switch  # type: ignore[attr-defined]
    # Without it, CUDA graphs would write into a copy of their own.
    torch._dynamo.mark_static_address(row)
    return row


def add_norm(part: torch.Tensor, row: torch.Tensor, side: int, copies: int) -> None:
    """Add the norm of a gradient, of which `copies` ranks hold the same part."""
    switch: Switch | None = getattr(row, "switch", None)
    # A CUDA graph never runs what it did not capture.
    recorded = is_capturing(part.device)
    if switch is None or not (switch.armed or recorded):
        return
    try:
        add(row, side, norm_of(part, copies))
    except Exception as error:
        switch.fault = error


def norm_of(part: torch.Tensor, copies: int) -> torch.Tensor:
    """Return what a gradient adds, of which `copies` ranks hold the same part."""
    wide = torch.promote_types(part.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=wide)
    return norm / copies**0.5 if copies > 1 else norm


def add(row: torch.Tensor, side: int, norm: torch.Tensor) -> None:
    """Add a norm to one side of a row."""
    row.switch.written = True  # type: ignore[attr-defined]
    # `data` has a version of its own: autograd may have saved the row for a compiled graph.
    cells = row.data[side]
    cells[0].hypot_(norm)
    cells[1].add_(1)

"""Gradient norms at both ends of every block: in which steps they are measured, what is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distmon.collect.gradient_gain.block_hooks import BlockHooks, add_gradient
from distmon.collect.gradient_gain.block_table import COLUMNS, Blocks
from distmon.collect.gradient_gain.in_graph import something_was_compiled
from distmon.collect.gradient_gain.rows import Switch
from distmon.collect.own_hooks import KeptHook, KeptHooks
from distmon.device import DeviceMark, is_accelerator, pinned, to_device
from distmon.native import NativeModule


class BackwardNorms:
    """Measures the blocks of one monitor. Without blocks it does nothing."""

    def __init__(
        self,
        blocks: Blocks,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        in_stages: bool = False,
        native: NativeModule | None = None,
    ) -> None:
        """`blocks` are those of the whole model, `modules` those of this rank, on `device`.

        `in_stages`: ranks hold different modules. `native` is faster on a CPU.
        """
        self.blocks = blocks
        self._in_stages = in_stages
        self.switch = Switch(native)
        self._held = {i: modules[name] for i, name in enumerate(blocks.names) if name in modules}
        """Blocks of this rank, by their row in the table of all blocks."""
        self._hooks = [BlockHooks(device, self.switch, i) for i in range(len(self._held))]
        self._cells = np.zeros((len(self._held), 2, 2))
        self._compiled_seconds = 0.0
        if native is not None and device.type == "cpu" and self._held:
            self.switch.compiled = native.gain_hooks(len(self._held), self._add_unusual)
        self._on_blocks = KeptHooks(self._put_on_blocks, native)
        self._rows = torch.tensor([*self._held], dtype=torch.int64)
        self._host_rows = self._rows.numpy()
        # On an accelerator a graph may be captured at any time, and the host has time to spare.
        self._removable = device.type == "cpu"

    @property
    def hook_seconds(self) -> float:
        """Time that the hooks took in forward and backward passes so far."""
        return self.switch.seconds + self.compiled_seconds

    @property
    def compiled_seconds(self) -> float:
        """The part of it that compiled hooks took."""
        if self.switch.compiled is not None:
            self._compiled_seconds += self.switch.compiled.take_seconds()
        return self._compiled_seconds

    @property
    def size(self) -> int:
        """How many numbers are sent."""
        return len(self.blocks.names) * len(COLUMNS)

    def install(self) -> None:
        """Register the hooks on the blocks, before the model is called. Safe to call twice."""
        self._on_blocks.install()

    def _put_on_blocks(self) -> Iterator[KeptHook]:
        for hooks, block in zip(self._hooks, self._held.values(), strict=True):
            yield from hooks.put_on(block)

    def remove(self) -> None:
        """Measure nothing more, and remove the hooks. Safe to call twice."""
        self.switch.arm(False)
        self._on_blocks.remove()

    def arm(self, wanted: bool, first: bool) -> None:
        """Clear the rows before a step that is `wanted`, and measure in it.

        `first`: no step has completed yet. Pipelines of torch make a trial run before their first
        step, with a backward pass of made-up numbers; that one is never measured.

        Where nothing was compiled, the hooks are removed for steps that are not observed: each
        costs some microseconds of cold code. A compiled graph keeps the hooks that it was traced
        with.
        """
        wanted = wanted and not (first and self._in_stages)
        self.switch.arm(wanted)
        if wanted:
            self._clear()
            self.install()
        elif not first and self._removable and not something_was_compiled():
            self._on_blocks.remove()

    def _add_unusual(self, gradient: torch.Tensor, ends: Sequence[tuple[int, int]]) -> None:
        """Add a gradient that the compiled hooks cannot read; called by them."""
        add_gradient(gradient, [(self._hooks[i], side) for i, side in ends], self.switch)

    def _clear(self) -> None:
        if self.switch.compiled is not None:
            self.switch.compiled.clear()
        if self.switch.written:
            self.switch.written = False
            for hooks in self._hooks:
                if hooks.cells is not None:
                    hooks.cells.fill(0)
        elsewhere = [hooks.row.data for hooks in self._hooks if hooks.cells is None]
        if elsewhere:
            torch._foreach_zero_(elsewhere)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the rows as they are during a backward pass that is not the training step's."""
        armed, rows = self.switch.armed, [hooks.row.data for hooks in self._hooks]
        kept = [row.clone() for row in rows] if armed else []
        self.switch.arm(False)
        try:
            yield
        finally:
            self.switch.arm(armed)
            for row, before in zip(rows, kept, strict=False):
                row.copy_(before)  # a CUDA graph does not read the switch

    @property
    def at_rest(self) -> bool:
        """Whether no step is measured, nothing has failed, and no hook is to be removed."""
        on = bool(self._held) and self._on_blocks.installed and self._removable
        return not on and not self.switch.armed and self.switch.fault is None

    def take_fault(self) -> Exception | None:
        """Return what failed in a hook since the last call; this rank's part is then unknown."""
        fault, self.switch.fault = self.switch.fault, None
        return fault

    def send(self, into: torch.Tensor) -> None:
        """Fill this rank's part of the flat buffer that is summed over ranks.

        Zeros when the step was not measured: the rows are then undefined. NaN after a fault, which
        no sum over ranks can hide.
        """
        faulty, hooks = self.switch.fault is not None, self.switch.compiled
        only_compiled = self.switch.armed and not (faulty or self.switch.written)
        if only_compiled and hooks is not None and hooks.put(into, self._host_rows):
            return
        measured = self._hooks if self.switch.armed or faulty else []
        if self.switch.compiled is not None:
            self.switch.compiled.read(self._cells)
        if into.is_cpu and all(hooks.cells is not None for hooks in measured):
            self._send_from_host(measured, faulty, into.numpy())
            return
        table = into.view(-1, len(COLUMNS)).zero_()
        if not measured:
            return
        if self._rows.device != into.device:
            self._rows = to_device(self._rows, into.device)
        held = torch.ones((len(measured), len(COLUMNS)), dtype=into.dtype, device=into.device)
        if faulty:
            held[:, :-1] = torch.nan
        else:
            sums = _gathered([hooks.row.data for hooks in measured], into.device)
            sums[:, :, 0].square_()
            if self.switch.compiled is not None:  # for blocks on the host
                compiled = to_device(torch.from_numpy(self._cells), into.device)
                sums[:, :, 0] += compiled[:, :, 0].square()
                sums[:, :, 1] += compiled[:, :, 1]
            held[:, :-1] = sums.flatten(1)
        table.index_copy_(0, self._rows, held)

    def _send_from_host(
        self, measured: Sequence[BlockHooks], faulty: bool, into: NDArray[np.float64]
    ) -> None:
        """Do the same in numpy: torch's operators would take longer than all hooks together."""
        table = into.reshape(-1, len(COLUMNS))
        table.fill(0)
        if not measured:
            return
        held = self._cells.copy()
        np.square(held[:, :, 0], out=held[:, :, 0])
        if self.switch.written:  # by hooks in Python, beside the compiled ones or instead of them
            for mine, hooks in zip(held, measured, strict=True):
                assert hooks.cells is not None
                mine += hooks.cells ** (2, 1)
        rows = self._host_rows
        table[rows, :-1] = math.nan if faulty else held.reshape(len(held), -1)
        table[rows, -1] = 1


def _gathered(rows: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the rows as one table on `device`.

    With weights on the host, the rows of blocks that had a gradient are on an accelerator. They are
    waited for: the optimizer on the host has just waited for the gradients.
    """
    for other in {row.device for row in rows} - {device}:
        there = [i for i, row in enumerate(rows) if row.device == other]
        moved = _moved(torch.stack([rows[i] for i in there]), device)
        for i, row in zip(there, moved, strict=True):
            rows[i] = row.to(torch.float64)
    return torch.stack(rows)


def _moved(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    if table.is_cpu:
        return to_device(table, device)
    if is_accelerator(device):
        return table.to(device, non_blocking=True)
    host = pinned(tuple(table.shape), table.dtype)
    host.copy_(table, non_blocking=True)
    DeviceMark(table.device).wait()
    return host

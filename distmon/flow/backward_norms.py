"""Gradient norms at both ends of every block of this rank: when they are added up, what is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from distmon.device_marks import to_device
from distmon.flow.block_hooks import BlockHooks
from distmon.flow.blocks import Blocks
from distmon.flow.in_graph import something_was_compiled
from distmon.flow.rows import Switch
from distmon.native import NativeModule

COLUMNS: Final = ("input_square", "input_count", "output_square", "output_count", "holders")
"""What is sent of a block; ranks add them up. `holders` counts the ranks that have the block."""


class BackwardNorms:
    """The blocks of one monitor. Without blocks it does nothing."""

    def __init__(
        self,
        blocks: Blocks,
        here: Mapping[str, nn.Module],
        device: torch.device,
        in_stages: bool = False,
        native: NativeModule | None = None,
    ) -> None:
        """`blocks` are those of the whole model, `here` the modules of this rank, on `device`.

        `in_stages`: ranks hold different modules. `native` is faster on a CPU.
        """
        self.blocks = blocks
        self._in_stages = in_stages
        self._switch = Switch(native)
        self._here = {place: here[name] for place, name in enumerate(blocks.names) if name in here}
        self._hooks = [BlockHooks(device, self._switch) for _ in self._here]
        self._handles: list[RemovableHandle] = []
        self._places = torch.tensor([*self._here], dtype=torch.int64)
        # On an accelerator a graph may be recorded at any time, and the host has time to spare.
        self._may_come_off = device.type == "cpu"

    @property
    def size(self) -> int:
        """Numbers that are sent."""
        return len(self.blocks.names) * len(COLUMNS)

    def install(self) -> None:
        """Put the hooks on the blocks, before the model is called. Safe to call twice."""
        if self._handles:
            return
        for hooks, block in zip(self._hooks, self._here.values(), strict=True):
            self._handles += hooks.put_on(block)

    def remove(self) -> None:
        """Watch nothing any more, and take the hooks off. Safe to call twice."""
        self._switch.armed = False
        self._take_off()

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def arm(self, wanted: bool, first: bool) -> None:
        """Say before a step whether it is observed; what was added up is dropped.

        `first`: no step has been made yet. The pipelines of torch make a trial run before theirs,
        with a backward pass of made-up numbers, so that one is never watched.

        Where nothing was compiled the hooks are off in steps that are not observed: each costs some
        microseconds of cold code. A compiled graph has the hooks that were there when it was made.
        """
        wanted = wanted and not (first and self._in_stages)
        self._switch.armed = wanted
        if wanted:
            self._clear()
            self.install()
        elif not first and self._may_come_off and not something_was_compiled():
            self._take_off()

    def _clear(self) -> None:
        for hooks in self._hooks:
            if hooks.cells is not None:
                hooks.cells.fill(0)
        elsewhere = [hooks.row.data for hooks in self._hooks if hooks.cells is None]
        if elsewhere:
            torch._foreach_zero_(elsewhere)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For a backward pass that is not the training step's own: it leaves no trace."""
        armed, rows = self._switch.armed, [hooks.row.data for hooks in self._hooks]
        kept = [row.clone() for row in rows] if armed else []
        self._switch.armed = False
        try:
            yield
        finally:
            self._switch.armed = armed
            for row, before in zip(rows, kept, strict=False):
                row.copy_(before)  # a CUDA graph does not ask the switch

    @property
    def at_rest(self) -> bool:
        """Whether no step is watched, nothing went wrong, and no hook could come off."""
        on = bool(self._handles) and self._may_come_off
        return not on and not self._switch.armed and self._switch.fault is None

    def take_fault(self) -> Exception | None:
        """What went wrong in a hook since the last call; this rank's part is then unknown."""
        fault, self._switch.fault = self._switch.fault, None
        return fault

    def send(self, into: torch.Tensor) -> None:
        """Fill this rank's part of the flat buffer that ranks add up.

        Zeros when the step was not watched: nobody knows what is in the rows then. NaN after a
        fault, which no sum over ranks can hide.
        """
        faulty = self._switch.fault is not None
        watched = self._hooks if self._switch.armed or faulty else []
        if into.is_cpu and all(hooks.cells is not None for hooks in watched):
            self._send_from_host(watched, faulty, into.numpy())
            return
        table = into.view(-1, len(COLUMNS)).zero_()
        if not watched:
            return
        if self._places.device != into.device:
            self._places = to_device(self._places, into.device)
        held = torch.ones((len(watched), len(COLUMNS)), dtype=into.dtype, device=into.device)
        if faulty:
            held[:, :-1] = torch.nan
        else:
            sums = torch.stack([hooks.row.data for hooks in watched])
            sums[:, :, 0].square_()
            held[:, :-1] = sums.flatten(1)
        table.index_copy_(0, self._places, held)

    def _send_from_host(
        self, watched: Sequence[BlockHooks], faulty: bool, into: NDArray[np.float64]
    ) -> None:
        """The same in numpy: torch's operations would take longer than all hooks together."""
        table = into.reshape(-1, len(COLUMNS))
        table.fill(0)
        for place, hooks in zip(self._here, watched, strict=False):
            assert hooks.cells is not None
            (input_norm, inputs), (output_norm, outputs) = hooks.cells.tolist()
            held = (input_norm**2, inputs, output_norm**2, outputs)
            table[place] = (*((math.nan,) * 4 if faulty else held), 1)

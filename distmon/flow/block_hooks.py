"""What hangs on one block: hooks that find the gradients of its input and output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from distmon.flow.in_graph import never_compile_alone, operator_library
from distmon.flow.rows import INPUT, OUTPUT, Switch, add, new_row, norm_of
from distmon.layout import local_part

_NESTING = 3
"""How deep in the arguments of a block its tensor is looked for."""


class BlockHooks:
    """Adds up the norms of a block's gradients in its row.

    Tensors are hooked, not the module's backward: that would wrap the block's input, and a block
    that works in place on it could no longer be trained.
    """

    def __init__(self, device: torch.device, switch: Switch) -> None:
        self._switch = switch
        self._traceable = operator_library() is not None
        self._keep_row_on(device)
        never_compile_alone(
            *(BlockHooks._before, BlockHooks._after, BlockHooks._hang),
            *(_stream, _carries_gradient, _listen, Ear.__init__),
        )

    def put_on(self, block: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on, outside of others; the handles take them off.

        The hooks of wrappers may replace the tensor by one that only the block uses, and of what
        goes around the block nothing would be seen then.
        """
        return [
            block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            block.register_forward_hook(self._after),
        ]

    def cell(self, side: int) -> NDArray[np.float64] | None:
        """This side of the row where the host can write to it."""
        return None if self.cells is None else self.cells[side]

    def add(self, side: int, norm: torch.Tensor) -> None:
        """Add the norm of a gradient."""
        if self.row.device != norm.device:  # weights are on the host
            self._keep_row_on(norm.device)
        add(self.row, side, norm)

    def _keep_row_on(self, device: torch.device) -> None:
        self.row = new_row(device, self._switch)
        self.cells = self.row.numpy() if self.row.is_cpu else None
        """The row where the host can write to it."""

    def _before(self, _block: nn.Module, args: Any, kwargs: Any) -> None:
        # In this order: a compiler that sees the switch compiles anew when it is turned.
        if is_compiling() or self._switch.armed:
            self._hang(INPUT, (args, kwargs))

    def _after(self, _block: nn.Module, _args: Any, output: Any) -> None:
        if is_compiling() or self._switch.armed:
            self._hang(OUTPUT, output)

    def _hang(self, side: int, values: Any) -> None:
        if is_compiling():
            tensor = _stream(values)
            if tensor is not None and self._traceable:
                hook = self._on_input if side == INPUT else self._on_output
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            return
        try:
            tensor = _stream(values)
            if tensor is not None:
                _listen(tensor, self._switch, (self, side))
        except Exception as error:
            self._switch.fault = error

    def _on_input(self, gradient: torch.Tensor) -> None:
        self._add(INPUT, gradient)

    def _on_output(self, gradient: torch.Tensor) -> None:
        self._add(OUTPUT, gradient)

    def _add(self, side: int, gradient: torch.Tensor | None) -> None:
        """Part of a compiled graph, or of one that Python runs after all."""
        if not is_compiling():
            _hear(gradient, [(self, side)], self._switch)
            return
        found = _part(gradient)
        if found is not None:
            torch.ops.distmon.add_norm(found[0], self.row, side, found[1])


_End = tuple[BlockHooks, int]
"""A block, and which side of it."""


class Ear:
    """Hangs on a tensor, and tells the norm of its gradient to all ends of blocks that it is.

    What leaves one block is mostly what enters the next: the norm is computed once for both.
    """

    def __init__(self, switch: Switch, version: int) -> None:
        self.switch = switch
        self.version = version
        """Of the tensor; what is then changed in place has another gradient."""
        self.ends: list[_End] = []

    def __call__(self, gradient: torch.Tensor) -> None:
        _hear(gradient, self.ends, self.switch)


def _listen(tensor: torch.Tensor, switch: Switch, end: _End) -> None:
    ear: Ear | None = None
    for each in (tensor._backward_hooks or {}).values():
        # Several monitors may watch one model.
        if type(each) is Ear and each.switch is switch and each.version == tensor._version:
            ear = each
    if ear is None:
        ear = Ear(switch, tensor._version)
        tensor.register_hook(ear)  # type: ignore[no-untyped-call]
    # A checkpointed block is called again in the backward pass, with the same input.
    if end not in ear.ends:
        ear.ends.append(end)


def _hear(gradient: torch.Tensor | None, ends: Iterable[_End], switch: Switch) -> None:
    if gradient is None or not switch.armed:
        return
    try:
        native = switch.native
        if native and native.add_norm(gradient, [hooks.cell(side) for hooks, side in ends]):
            return
        found = _part(gradient)
        if found is not None:
            norm = norm_of(*found)
            for hooks, side in ends:
                hooks.add(side, norm)
    except Exception as error:
        switch.fault = error


def _stream(value: Any, nesting: int = _NESTING) -> torch.Tensor | None:
    """The first floating tensor in `value` that gets a gradient."""
    if isinstance(value, torch.Tensor):
        return value if _carries_gradient(value) else None
    if isinstance(value, dict):
        value = list(value.values())
    if nesting and isinstance(value, tuple | list):
        for each in value:
            found = _stream(each, nesting - 1)
            if found is not None:
                return found
    return None


def _carries_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad and tensor.is_floating_point()


def _part(gradient: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    """This rank's part of a gradient and how many ranks hold it; None when that is unknown."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return (gradient, 1) if type(gradient) is torch.Tensor else local_part(gradient)

"""Hooks on one block that measure the gradients of its input and output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.compiler import is_compiling

from distmon.collect.gradient_gain.in_graph import never_compile_alone, operator_library
from distmon.collect.gradient_gain.rows import INPUT, OUTPUT, Switch, add, new_row, norm_of
from distmon.collect.own_hooks import KeptHook, OwnHook
from distmon.layout import local_part

_NESTING = 3
"""Depth of nested arguments at which the tensor of a block is still found."""


class BlockHooks:
    """Adds the norms of a block's gradients to its row.

    Registers hooks on tensors, not a backward hook on the module: that would wrap the block's
    input, and a block that modifies its input in place could no longer be trained.
    """

    def __init__(self, device: torch.device, switch: Switch, number: int = 0) -> None:
        """`number`: of the block, for the compiled hooks of `switch`."""
        self.switch = switch
        self.number = number
        self._traceable = operator_library() is not None
        self._keep_row_on(device)
        never_compile_alone(
            *(BlockEnd.__call__, BlockHooks.hook_gradient, BlockHooks.hook_in_graph),
            *(_stream, _carries_gradient, _hook_tensor, GradientHook.__init__),
        )

    def put_on(self, block: nn.Module) -> Iterator[KeptHook]:
        """Register the hooks outside of others; yield each once it is registered.

        The hooks of wrappers may replace the tensor by one that only the block uses. The gradient
        of a residual connection around the block would then be missing.
        """
        before, after = BlockEnd(self, INPUT), BlockEnd(self, OUTPUT)
        handle = block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        yield KeptHook(handle, first=True)
        yield KeptHook(block.register_forward_hook(after))

    def cell(self, side: int) -> NDArray[np.float64] | None:
        """Return one side of the row; None unless it is on the host."""
        return None if self.cells is None else self.cells[side]

    def add(self, side: int, norm: torch.Tensor) -> None:
        """Add the norm of a gradient."""
        if self.row.device != norm.device:  # weights are on the host
            self._keep_row_on(norm.device)
        add(self.row, side, norm)

    def _keep_row_on(self, device: torch.device) -> None:
        self.row = new_row(device, self.switch)
        self.cells = self.row.numpy() if self.row.is_cpu else None
        """The row as numpy; None unless it is on the host."""

    def hook_in_graph(self, side: int, values: Any) -> None:
        """Register a hook on the tensor in `values` that gets a gradient, while it is compiled."""
        tensor = _stream(values)
        if tensor is not None and self._traceable:
            hook = self._on_input if side == INPUT else self._on_output
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def hook_gradient(self, side: int, values: Any) -> None:
        """Register a hook on the tensor in `values` that gets a gradient."""
        switch = self.switch
        compiled = switch.compiled
        tensor = _stream(values)
        if tensor is not None and not (
            compiled is not None and compiled.hook(tensor, self.number, side)
        ):
            _hook_tensor(tensor, switch, (self, side))

    def _on_input(self, gradient: torch.Tensor) -> None:
        self._add(INPUT, gradient)

    def _on_output(self, gradient: torch.Tensor) -> None:
        self._add(OUTPUT, gradient)

    def _add(self, side: int, gradient: torch.Tensor | None) -> None:
        """Add a gradient from within a compiled graph, or from one that Python runs after all."""
        if not is_compiling():
            add_gradient(gradient, [(self, side)], self.switch)
            return
        found = _local_part(gradient)
        if found is not None:
            torch.ops.distmon.add_norm(found[0], self.row, side, found[1])


class BlockEnd(OwnHook):
    """Forward hook at one side of a block."""

    def __init__(self, hooks: BlockHooks, side: int) -> None:
        self._hooks = hooks
        self._side = side

    def __call__(self, _block: nn.Module, args: Any, value: Any) -> None:
        """`value`: the keyword arguments on the input side, the output on the other."""
        hooks, side = self._hooks, self._side
        try:
            # In this order: a compiler that reads the switch would recompile when it changes.
            if is_compiling():
                hooks.hook_in_graph(side, (args, value) if side == INPUT else value)
            elif hooks.switch.armed:
                begin, compiled = perf_counter(), hooks.switch.compiled
                usual = args if side == INPUT else value
                if compiled is None or not compiled.hook(usual, hooks.number, side):
                    hooks.hook_gradient(side, (args, value) if side == INPUT else value)
                hooks.switch.seconds += perf_counter() - begin
        except Exception as error:  # never into the forward pass of the user
            hooks.switch.fault = error


_End = tuple[BlockHooks, int]
"""A block, and which side of it."""


class GradientHook:
    """Hook on a tensor that adds the norm of its gradient to every block that it enters or leaves.

    The output of one block is mostly the input of the next: the norm is computed once for both.
    """

    def __init__(self, switch: Switch, version: int) -> None:
        self.switch = switch
        self.version = version
        """Version of the tensor; after a change in place it has another gradient."""
        self.ends: list[_End] = []

    def __call__(self, gradient: torch.Tensor) -> None:
        add_gradient(gradient, self.ends, self.switch)


def _hook_tensor(tensor: torch.Tensor, switch: Switch, end: _End) -> None:
    """Register a hook for one end of a block, or extend the hook that the tensor has."""
    hook: GradientHook | None = None
    for each in (tensor._backward_hooks or {}).values():
        if type(each) is not GradientHook or each.switch is not switch:
            continue  # several monitors may observe one model
        if tensor.is_leaf or each.version == tensor._version:  # a leaf keeps its hook
            hook = each
    if hook is None:
        hook = GradientHook(switch, tensor._version)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    # A checkpointed block is called again in the backward pass, with the same input.
    if end not in hook.ends:
        hook.ends.append(end)


def add_gradient(gradient: torch.Tensor | None, ends: Iterable[_End], switch: Switch) -> None:
    """Add the norm of a gradient to these ends of blocks."""
    if gradient is None or not switch.armed:
        return
    try:
        begin = perf_counter()
        native = switch.native
        switch.written = True
        if not (native and native.add_norm(gradient, [hooks.cell(side) for hooks, side in ends])):
            found = _local_part(gradient)
            if found is not None:
                norm = norm_of(*found)
                for hooks, side in ends:
                    hooks.add(side, norm)
        switch.seconds += perf_counter() - begin
    except Exception as error:
        switch.fault = error


def _stream(value: Any, nesting: int = _NESTING) -> torch.Tensor | None:
    """Return the first floating tensor in `value` that gets a gradient."""
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


def _local_part(gradient: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    """Return this rank's part of a gradient and how many ranks hold it; None when unknown."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return (gradient, 1) if type(gradient) is torch.Tensor else local_part(gradient)

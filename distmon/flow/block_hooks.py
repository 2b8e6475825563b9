"""What hangs on one block: hooks that find the gradients of its input and output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distmon.flow.in_graph import never_compile_alone, operator_library
from distmon.flow.rows import INPUT, OUTPUT, Switch, add_norm, new_row
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
        self.row = new_row(device, switch)
        never_compile_alone(
            BlockHooks._before, BlockHooks._after, BlockHooks._hang, _stream, _carries_gradient
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

    def _before(self, _block: nn.Module, args: Any, kwargs: Any) -> None:
        self._hang(self._on_input, (args, kwargs))

    def _after(self, _block: nn.Module, _args: Any, output: Any) -> None:
        self._hang(self._on_output, output)

    def _on_input(self, gradient: torch.Tensor) -> None:
        self._add(INPUT, gradient)

    def _on_output(self, gradient: torch.Tensor) -> None:
        self._add(OUTPUT, gradient)

    def _hang(self, hook: Callable[[torch.Tensor], None], values: Any) -> None:
        if torch.compiler.is_compiling():
            tensor = _stream(values)
            if tensor is not None and self._traceable:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        elif self._switch.armed:
            try:
                tensor = _stream(values)
                # A checkpointed block is called again in the backward pass, with the same input.
                if tensor is not None and hook not in (tensor._backward_hooks or {}).values():
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            except Exception as error:
                self._switch.fault = error

    def _add(self, side: int, gradient: torch.Tensor | None) -> None:
        if torch.compiler.is_compiling():
            found = _part(gradient)
            if found is not None:
                torch.ops.distmon.add_norm(found[0], self.row, side, found[1])
        elif self._switch.armed:
            try:
                found = _part(gradient)
                if found is not None:
                    if self.row.device != found[0].device:
                        self.row = new_row(found[0].device, self._switch)  # weights are on the host
                    add_norm(found[0], self.row, side, found[1])
            except Exception as error:
                self._switch.fault = error


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

"""Time the hooks of a monitor from outside: a clock starts before each hook and stops after it.

Only torch's own hook order is used. Forward pre-hooks that are registered later with `prepend` run
earlier; all other hooks run in the order of registration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class HookClock:
    """Times what others hang on some modules, and on the tensors that enter and leave them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._handles: list[RemovableHandle] = []
        self._begin = 0.0
        self.seconds = 0.0
        """Since the last `around`."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Time the hooks that are registered inside of the `with` block."""
        self.seconds = 0.0
        for module in self._modules:
            self._on_inputs(module, self._close)
            self._on_outputs(module, self._open)
        yield
        for module in self._modules:
            self._on_inputs(module, self._open)
            self._on_outputs(module, self._close)

    def remove(self) -> None:
        """Take the clock off the modules. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_inputs(self, module: nn.Module, mark: Callable[[Any], None]) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            mark((args, kwargs))

        self._handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def _on_outputs(self, module: nn.Module, mark: Callable[[Any], None]) -> None:
        def hook(_: nn.Module, _args: Any, output: Any) -> None:
            mark(output)

        self._handles.append(module.register_forward_hook(hook))

    def _open(self, values: Any) -> None:
        """Start here, and before the hooks that others register on these tensors next."""
        for tensor in _with_gradients(values):
            tensor.register_hook(self._start)  # type: ignore[no-untyped-call]
        self._start()

    def _close(self, values: Any) -> None:
        """Stop here, and behind the hooks that others have registered on these tensors."""
        self._stop()
        for tensor in _with_gradients(values):
            tensor.register_hook(self._stop)  # type: ignore[no-untyped-call]

    def _start(self, _: torch.Tensor | None = None) -> None:
        self._begin = time.perf_counter()

    def _stop(self, _: torch.Tensor | None = None) -> None:
        self.seconds += time.perf_counter() - self._begin


def _with_gradients(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]

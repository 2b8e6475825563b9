"""Triton kernels on the simulated device: interpreted, in the order of the streams.

Needs TRITON_INTERPRET=1 before Triton is imported, and SIMULATED_CUDA_READABLE=1 since kernels read
addresses. A kernel is launched on the current stream of the current device, as Triton does,
whatever device its tensors are on.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.interpreter import GridExecutor

from simulated_cuda import device


def install() -> None:
    """Queue every kernel instead of running it at once."""
    run: Any = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [_bytes(arg) for arg in args]
        named = {name: _bytes(arg) for name, arg in kwargs.items()}
        if any(each is not arg for each, arg in zip(given, args, strict=True)):
            device.extension.launch(
                lambda: run(self, *given, **named), self.fn.__name__, meets_ranks=False
            )
        else:
            run(self, *args, **kwargs)

    GridExecutor.__call__ = launch


def _bytes(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg.is_cuda:
        return device.extension.bytes_of(arg.detach())
    return arg

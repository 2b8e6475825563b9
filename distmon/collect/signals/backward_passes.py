"""The backward passes of an observed step, seen from a few parameters.

The hooks exist during an observed step only. They run before a gradient is added to `.grad`, and
before ranks reduce it: what they see is this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch.utils.hooks import RemovableHandle

PER_OPTIMIZER: Final = 3
"""Parameters of each optimizer that are hooked."""
LARGEST: Final = 1 << 16
"""Elements of a parameter above which a smaller one is preferred."""
COMPARED: Final = 256
"""Elements that are compared between two passes."""


class BackwardPasses:
    """Counts the backward passes of a step and reads the gradients that they begin with.

    Only plain parameters are hooked: the hooks of a sharded one never run. Without a plain
    parameter nothing is known.
    """

    def __init__(self, parameters: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
        """`parameters` of each optimizer."""
        self._hooked = [each for group in parameters for each in _choose(group)]
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._counts: list[int] = []
        self._first: list[torch.Tensor | None] = []
        self._numbers = torch.zeros(3, dtype=torch.float64, device=device)
        self._paused = False
        self.fault: Exception | None = None
        """What went wrong in a hook; the others then do nothing."""

    @property
    def known(self) -> bool:
        """Whether there is a parameter to see them from."""
        return bool(self._hooked)

    @property
    def count(self) -> int:
        """Backward passes of this step that reached the same parameter."""
        return max(self._counts, default=0)

    def arm(self) -> None:
        """Install the hooks for the coming step."""
        self.disarm()
        self._counts = [0] * len(self._hooked)
        self._first = [None] * len(self._hooked)
        self._numbers.zero_()
        self._handles = [
            parameter.register_hook(self._hook(i, parameter))  # type: ignore[no-untyped-call]
            for i, parameter in enumerate(self._hooked)
            if parameter.requires_grad
        ]

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._first = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the passes inside the context."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def numbers(self) -> torch.Tensor:
        """Return [squared norm before the first pass, squared norm of the last pass, repeated]."""
        return self._numbers

    def _hook(self, i: int, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self.fault is None and self._handles and not self._paused:
                try:
                    self._note(i, parameter, gradient.detach())
                except Exception as error:  # never into the backward pass of the user
                    self.fault = error

        return hook

    @torch.no_grad()
    def _note(self, i: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            return
        self._counts[i] += 1
        head = gradient.reshape(-1)[:COMPARED]
        self._numbers[1] += _square(gradient)
        if self._counts[i] == 1:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._numbers[0] += _square(parameter.grad)
            self._first[i] = head.clone()
            return
        first, kept = self._first[i], parameter.grad
        # A closure that clears gradients between its passes may run twice on the same weights.
        if first is not None and kept is not None and not kept.is_sparse:
            same = (head == first).all() & (first != 0).any() & (kept != 0).any()
            same = same.to(torch.float64)
            self._numbers[2] = torch.maximum(self._numbers[2], same)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32).square().sum().to(torch.float64)


def _choose(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a few plain parameters from the first layer to the last."""
    plain = [each for each in parameters if _is_plain(each)]
    small = [each for each in plain if each.numel() <= LARGEST]
    small = small or sorted(plain, key=lambda each: each.numel())[:PER_OPTIMIZER]
    if len(small) <= PER_OPTIMIZER:
        return small
    last = len(small) - 1
    return [small[round(i * last / (PER_OPTIMIZER - 1))] for i in range(PER_OPTIMIZER)]


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) in (torch.Tensor, torch.nn.Parameter)
        and parameter.is_leaf
        and parameter.requires_grad
        and parameter.numel() > 0
        and not parameter.is_complex()
    )

"""The backward passes of an observed step, seen from a few parameters.

The hooks exist during an observed step only. One runs before a gradient is added to `.grad`, and
before ranks reduce it: what it sees is this rank's own. What it has seen counts when the other one
runs, after the gradient was added: `torch.autograd.grad` adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch.utils.hooks import RemovableHandle

from distmon.native import NativeModule

PER_OPTIMIZER: Final = 3
"""Parameters of each optimizer that are hooked."""
LARGEST: Final = 1 << 16
"""Elements of a parameter above which a smaller one is preferred."""
COMPARED: Final = 256
"""Elements that are compared between two passes."""
_Hook = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class _Pass:
    """What one backward pass brings to one parameter."""

    head: torch.Tensor
    square: torch.Tensor | float
    """Of the gradient."""
    before: torch.Tensor | float
    """Square of what `.grad` held before the first pass, 0 once that was cleared."""
    repeated: torch.Tensor | None
    """Whether it brings the same as the first one."""


class BackwardPasses:
    """Counts the backward passes of a step and reads the gradients that they begin with.

    Only plain parameters are hooked: the hooks of a sharded one never run. Without a plain
    parameter nothing is known.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[torch.Tensor]],
        device: torch.device,
        native: NativeModule | None = None,
    ) -> None:
        """`parameters` of each optimizer; `native` is faster on a CPU."""
        self._native = native if device.type == "cpu" else None
        self._on_host = 0.0
        """What `native` has added up of the second number."""
        self._hooked = [each for group in parameters for each in _choose(group)]
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._counts: list[int] = []
        self._first: list[torch.Tensor | None] = []
        self._pending: list[_Pass | None] = []
        self._before: list[torch.Tensor | float] = []
        """Square of what each parameter's `.grad` held before the first pass, unless it was cleared
        since: another model's loss may have reached the parameter before its own step began."""
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
        self._pending = [None] * len(self._hooked)
        self._before = [0.0] * len(self._hooked)
        self._numbers.zero_()
        self._on_host = 0.0
        for i, parameter in enumerate(self._hooked):
            if parameter.requires_grad:
                before, after = self._hooks(i, parameter)
                self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._first = []
        self._pending = []

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
        there = [each for each in self._before if isinstance(each, torch.Tensor)]
        host = sum(each for each in self._before if not isinstance(each, torch.Tensor))
        if there:
            self._numbers[0] += torch.stack(there).sum()
        if host or self._on_host:  # on a CPU only: a device would wait
            self._numbers[:2] += torch.tensor([host, self._on_host], dtype=torch.float64)
        self._before, self._on_host = [], 0.0
        return self._numbers

    def _hooks(self, i: int, parameter: torch.Tensor) -> tuple[_Hook, _Hook]:
        def guarded(call: Callable[[torch.Tensor], None]) -> _Hook:
            def hook(tensor: torch.Tensor) -> None:
                if self.fault is None and self._handles and not self._paused:
                    try:
                        call(tensor)
                    except Exception as error:  # never into the backward pass of the user
                        self.fault = error

            return hook

        before = guarded(lambda gradient: self._see(i, parameter, gradient.detach()))
        return before, guarded(lambda _: self._count_pass(i))

    @torch.no_grad()
    def _see(self, i: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            return
        kept, first = parameter.grad, self._first[i]
        if kept is not None and kept.is_sparse:
            kept = None
        head = gradient.reshape(-1)[:COMPARED]
        before: torch.Tensor | float = 0.0
        repeated = None
        if self._counts[i] == 0:
            head = head.clone()
            before = 0.0 if kept is None else self._square(kept)
        # A closure that clears gradients between its passes may run twice on the same weights.
        elif first is not None and kept is not None:
            holds = (kept != 0).any()
            same = (head == first).all() & (first != 0).any() & holds
            repeated = same.to(torch.float64)
            before = self._before[i]
            before = before * holds if isinstance(before, torch.Tensor) or before else 0.0
        self._pending[i] = _Pass(head, self._square(gradient), before, repeated)

    @torch.no_grad()
    def _count_pass(self, i: int) -> None:
        seen, self._pending[i] = self._pending[i], None
        if seen is None:
            return
        self._counts[i] += 1
        self._before[i] = seen.before
        if isinstance(seen.square, float):
            self._on_host += seen.square
        else:
            self._numbers[1] += seen.square
        if self._counts[i] == 1:
            self._first[i] = seen.head
        if seen.repeated is not None:
            self._numbers[2] = torch.maximum(self._numbers[2], seen.repeated)

    def _square(self, tensor: torch.Tensor) -> torch.Tensor | float:
        square = None if self._native is None else self._native.sum_of_squares(tensor)
        return _square(tensor) if square is None else square


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

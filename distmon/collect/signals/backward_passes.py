"""The backward passes of an observed step, seen from a few parameters.

The hooks exist during an observed step only. One runs before a gradient is added to `.grad`, and
before ranks reduce it: what it sees is this rank's own. What it has seen counts when the other one
runs, after the gradient was added: `torch.autograd.grad` adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from distmon.collect.own_hooks import KeptHook, KeptHooks
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

    head: torch.Tensor | int
    """The first elements of the gradient, or a number that stands for them; 0 when all are 0."""
    square: torch.Tensor | float
    """Of the gradient."""
    before: torch.Tensor | float
    """Square of what `.grad` held before the first pass, 0 once that was cleared."""
    repeated: torch.Tensor | float | None
    """1 when it brings the same as the first one, else 0."""


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
        self._on_host = [0.0, 0.0, 0.0]
        """What is known on the host of the numbers."""
        self._hooked = [each for group in parameters for each in _choose(group)]
        self._device = device
        self._hooks = KeptHooks(self._register, self._native)
        self._armed = False
        self._counts: list[int] = []
        self._first: list[torch.Tensor | int | None] = []
        self._pending: list[_Pass | None] = []
        self._before: list[torch.Tensor | float] = []
        """Square of what each parameter's `.grad` held before the first pass, unless it was cleared
        since: another model's loss may have reached the parameter before its own step began."""
        self._numbers = torch.zeros(3, dtype=torch.float64, device=device)
        self._in_tensors = False
        """Whether `_numbers` has a part of the numbers."""
        self._paused = False
        self.fault: Exception | None = None
        """What went wrong in a hook; the others then do nothing."""
        self.seconds = 0.0
        """Time that the hooks took so far."""

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
        self._on_host = [0.0, 0.0, 0.0]
        if self._in_tensors:
            self._numbers.zero_()
            self._in_tensors = False
        self._armed = True
        self._hooks.install()

    def disarm(self) -> None:
        """Remove the hooks."""
        self._armed = False
        self._hooks.remove()
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

    def numbers(self) -> torch.Tensor | list[float]:
        """Return [squared norm before the first pass, squared norm of the last pass, repeated].

        On a CPU as plain numbers.
        """
        there, host = [], self._on_host
        for each in self._before:
            if isinstance(each, torch.Tensor):
                there.append(each)
            else:
                host[0] += each
        self._before, self._on_host = [], [0.0, 0.0, 0.0]
        if there:
            self._in_tensors = True
            self._numbers[0] += torch.stack(there).sum()
        if self._device.type != "cpu":
            return self._numbers
        if not self._in_tensors:
            return host
        stale, own, repeated = self._numbers.tolist()
        return [host[0] + stale, host[1] + own, max(host[2], repeated)]

    def _register(self) -> Iterator[KeptHook]:
        for i, parameter in enumerate(self._hooked):
            if not parameter.requires_grad:
                continue
            before, after = self._hooks_of(i, parameter)
            yield KeptHook(parameter.register_hook(before))  # type: ignore[no-untyped-call]
            post = parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            yield KeptHook(post)

    def _hooks_of(self, i: int, parameter: torch.Tensor) -> tuple[_Hook, _Hook]:
        def before(gradient: torch.Tensor) -> None:
            if self._armed and self.fault is None and not self._paused:
                try:
                    begin = perf_counter()
                    self._pending[i] = self._see(i, parameter, gradient)
                    self.seconds += perf_counter() - begin
                except Exception as error:  # never into the backward pass of the user
                    self.fault = error

        def after(_: torch.Tensor) -> None:
            if self._armed and self.fault is None and not self._paused:
                try:
                    begin = perf_counter()
                    self._count_pass(i)
                    self.seconds += perf_counter() - begin
                except Exception as error:
                    self.fault = error

        return before, after

    def _see(self, i: int, parameter: torch.Tensor, gradient: torch.Tensor) -> _Pass | None:
        seen = None if self._native is None else self._native.digest(gradient, COMPARED)
        if seen is None:
            return self._see_by_torch(i, parameter, gradient.detach())
        square, head = seen
        kept, first = parameter.grad, self._first[i]
        before: torch.Tensor | float = 0.0
        if kept is None:
            return _Pass(head, square, before, None)
        if self._counts[i] == 0:
            return _Pass(head, square, 0.0 if kept.is_sparse else self._square(kept), None)
        holds = not kept.is_sparse and bool(self._square(kept) > 0)
        before = self._before[i] if holds else 0.0
        return _Pass(head, square, before, float(first == head and head != 0 and holds))

    @torch.no_grad()
    def _see_by_torch(
        self, i: int, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> _Pass | None:
        if gradient.is_sparse:
            return None
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
        elif isinstance(first, torch.Tensor) and kept is not None:
            holds = (kept != 0).any()
            same = (head == first).all() & (first != 0).any() & holds
            repeated = same.to(torch.float64)
            before = self._before[i]
            before = before * holds if isinstance(before, torch.Tensor) or before else 0.0
        return _Pass(head, self._square(gradient), before, repeated)

    def _count_pass(self, i: int) -> None:
        seen, self._pending[i] = self._pending[i], None
        if seen is None:
            return
        self._counts[i] += 1
        self._before[i] = seen.before
        if self._counts[i] == 1:
            self._first[i] = seen.head
        if isinstance(seen.square, float):
            self._on_host[1] += seen.square
        else:
            self._in_tensors = True
            self._numbers[1] += seen.square
        if isinstance(seen.repeated, float):
            self._on_host[2] = max(self._on_host[2], seen.repeated)
        elif seen.repeated is not None:
            self._in_tensors = True
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

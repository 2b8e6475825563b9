"""Losses, gradient norms and skipped steps of a training loop, taken where torch sees them.

- loss: in `torch.autograd.backward`, which `loss.backward()` calls; without the scale of a
  `GradScaler`
- total gradient norm: in `torch.nn.utils.clip_grad_norm_`, between the norm and the clipping;
  in a wrapper's method of that name, after it
- skipped step: in `GradScaler.step`, when the optimizer has not stepped in it
- gradients cleared: in `Optimizer.zero_grad`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch.nn.utils import clip_grad

from distmon.integrations.patches import Patches
from distmon.layout.own_clipping import wrappers_that_clip

_UNSCALED: Final = "_distmon_unscaled"
"""Attribute of a scaled loss: the loss before scaling."""


class Listener(Protocol):
    """Gets the signals, in the order in which they happen. What it raises reaches the training."""

    def loss(self, value: torch.Tensor) -> None:
        """A backward pass from a scalar begins; `value` is detached, without loss scaling."""

    def grad_norm(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        """The gradients of `parameters` are about to be clipped; `norm` is their total norm."""

    def gradients_cleared(self, optimizer: Any) -> None:
        """`optimizer.zero_grad()` was called."""

    def scaler_stepped(self, optimizer: Any) -> None:
        """A `GradScaler` has stepped `optimizer`, or skipped its step."""


class LoopSignals:
    """Replaces a few functions of torch while it listens; `end` restores them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._patches = Patches()

    def begin(self) -> None:
        """Start listening."""
        patch = self._patches.apply
        patch(torch.autograd, "backward", self._in_backward)
        clip = self._in_clipping(clip_grad._clip_grads_with_norm_)
        for owner in (clip_grad, torch.nn.utils):
            for name in ("_clip_grads_with_norm_", "clip_grads_with_norm_"):
                if hasattr(owner, name):
                    patch(owner, name, lambda _: clip)
        for wrapper in wrappers_that_clip():
            patch(wrapper, "clip_grad_norm_", self._in_own_clipping)
        patch(torch.amp.GradScaler, "scale", self._in_scaling)
        patch(torch.amp.GradScaler, "step", self._in_scaler_step)
        patch(torch.optim.Optimizer, "zero_grad", self._in_clearing)

    def end(self) -> None:
        """Stop listening."""
        self._patches.undo()

    def _in_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and grad_tensors is None:
                loss = _loss_of(tensors)
                if loss is not None:
                    self._listener.loss(loss)
            return original(tensors, grad_tensors, *args, **kwargs)

        return backward

    def _in_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(
            parameters: Any, max_norm: Any, total_norm: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            self._listener.grad_norm(given, total_norm)
            return original(given, max_norm, total_norm, *args, **kwargs)

        return clip

    def _in_own_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip_grad_norm_(model: Any, *args: Any, **kwargs: Any) -> Any:
            norm = original(model, *args, **kwargs)
            self._listener.grad_norm([*model.parameters()], norm)
            return norm

        return clip_grad_norm_

    def _in_clearing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._listener.gradients_cleared(optimizer)
            return original(optimizer, *args, **kwargs)

        return zero_grad

    def _in_scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(scaled, torch.Tensor) and scaled is not outputs:
                setattr(scaled, _UNSCALED, outputs.detach())
            return scaled

        return scale

    def _in_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, optimizer, *args, **kwargs)
            self._listener.scaler_stepped(optimizer)
            return result

        return step


def _loss_of(tensors: Any) -> torch.Tensor | None:
    """Return the sum of the scalars that a backward pass starts from; None for other tensors."""
    roots: Iterable[Any] = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    total: torch.Tensor | None = None
    for root in roots:
        if not isinstance(root, torch.Tensor) or root.numel() != 1:
            return None
        value = getattr(root, _UNSCALED, root).detach()
        total = value if total is None else total + value
    return total

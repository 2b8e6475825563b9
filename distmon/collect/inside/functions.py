"""See the functions that a module's own code calls: attention, and activation functions.

Between the pre-hook and the hook of such a module, in a training forward of an observed step, a
`TorchFunctionMode` is active. It changes nothing: what it sees is called as it is, and the result
is measured. A compiled module is left alone: its graph would be compiled again for the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from distmon.collect.gradient_gain.in_graph import never_compile_alone, something_was_compiled
from distmon.collect.inside.activation_rows import UNBOUNDED
from distmon.collect.inside.activations import ActivationRow
from distmon.collect.inside.attention import AttentionRow
from distmon.collect.inside.tables import Watching
from distmon.collect.own_hooks import OwnHook

_ATTENTION: Final = "scaled_dot_product_attention"
_WITHIN: Final = "multi_head_attention_forward"
"""Calls the two others out of sight: a mode does not see what a function of torch calls."""


class Tap:
    """What is measured of the functions that one module calls."""

    def __init__(self) -> None:
        self.attention: AttentionRow | None = None
        self.functions: dict[str, list[ActivationRow]] = {}
        self.calls: dict[str, int] = {}
        """Calls of each function in this forward of the module."""
        self.later: list[tuple[ActivationRow, torch.Tensor]] = []
        """Results of bounded functions, measured unless they are what the module returns."""

    def __bool__(self) -> bool:
        return self.attention is not None or any(self.functions.values())

    def saw(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Measure one call."""
        if name == _ATTENTION and self.attention is not None:
            self.attention.add_call(*args, **kwargs)
        elif name == "softmax" and self.attention is not None:
            self.attention.add_logits(args[0] if args else kwargs["input"], result)
        name = name.removesuffix("_")
        rows = self.functions.get(name)
        if not rows or not isinstance(result, torch.Tensor) or result.dim() < 2:
            return
        call = self.calls[name] = self.calls.get(name, -1) + 1
        if call >= len(rows):
            return
        if rows[call].bounds == UNBOUNDED:
            rows[call].add(result)
        else:
            self.later.append((rows[call], result))

    def rows_of(self, name: str) -> list[torch.Tensor]:
        """Return the sums that a call of this function is added to."""
        if self.attention is not None and name in (_ATTENTION, "softmax"):
            return [self.attention.sums]
        return [row.sums for row in self.functions.get(name.removesuffix("_"), ())]

    def begin(self) -> None:
        """Begin a forward of the module."""
        self.calls, self.later = {}, []

    def end(self, output: Any) -> None:
        """Measure the bounded functions inside of the module."""
        later, self.later = self.later, []
        for row, result in later:
            if result is not output:
                row.add(result)


class FunctionTaps:
    """The taps of one monitor, and the mode that is active while one of their modules runs."""

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self._stack: list[Tap] = []
        self._mode: _Mode | None = None

    def restart(self) -> None:
        """Forget a forward that ended by an error."""
        self._stack = []

    def put_on(self, module: nn.Module, tap: Tap) -> Iterator[RemovableHandle]:
        """Register the hooks of a module."""
        if _is_compiled(module):
            return
        enter, leave = _Enter(self, tap), _Leave(self, tap)
        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)

    def enter(self, module: nn.Module, tap: Tap) -> None:
        """Begin to see what `module` calls, if its call counts."""
        device = torch.device("cpu")
        if not self._stack and something_was_compiled():
            return  # a compiled function inside would be compiled again for the mode
        if self.watching.counts(module.training, device):
            tap.begin()
            self._stack.append(tap)
            if self._mode is None:
                self._mode = _Mode(self)
                self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, tap: Tap, output: Any) -> None:
        """End what `enter` began."""
        if not self._stack or self._stack[-1] is not tap:
            return
        self._stack.pop()
        if not self._stack and self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        tap.end(output)

    def saw(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Measure one call of a function in the innermost module that has a tap."""
        try:
            begin = perf_counter()
            if self._stack:
                with torch.no_grad():
                    self._stack[-1].saw(name, args, kwargs, result)
            self.watching.seconds += perf_counter() - begin
        except Exception as error:
            self.watching.failed(error, *self._stack[-1].rows_of(name))


class _Enter(OwnHook):
    def __init__(self, taps: FunctionTaps, tap: Tap) -> None:
        self._taps, self._tap = taps, tap
        never_compile_alone(_Enter.__call__)

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if is_compiling() or not self._taps.watching.armed:
            return
        watching, begin = self._taps.watching, perf_counter()
        try:
            self._taps.enter(module, self._tap)
        except Exception as error:
            watching.fault = error
        watching.seconds += perf_counter() - begin


class _Leave(OwnHook):
    def __init__(self, taps: FunctionTaps, tap: Tap) -> None:
        self._taps, self._tap = taps, tap
        never_compile_alone(_Leave.__call__)

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if is_compiling() or not self._taps.watching.armed:
            return
        watching, begin = self._taps.watching, perf_counter()
        try:
            self._taps.leave(self._tap, output)
        except Exception as error:
            watching.fault = error
        watching.seconds += perf_counter() - begin


_SEEN: Final = frozenset(
    {_ATTENTION, "softmax", "relu", "relu_", "relu6", "sigmoid", "sigmoid_", "tanh", "tanh_"}
)


class _Mode(TorchFunctionMode):
    def __init__(self, taps: FunctionTaps) -> None:
        super().__init__()
        self._taps = taps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == _WITHIN:
            with _seen_within(self._taps.saw):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _SEEN:
            self._taps.saw(name, args, kwargs, result)
        return result


@contextmanager
def _seen_within(saw: Callable[..., None]) -> Iterator[None]:
    """Show what `multi_head_attention_forward` calls, by its own globals."""
    before = {name: getattr(F, name) for name in (_ATTENTION, "softmax")}

    def shown(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = before[name](*args, **kwargs)
            saw(name, args, kwargs, result)
            return result

        return call

    try:
        for name in before:
            setattr(F, name, shown(name))
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _is_compiled(module: nn.Module) -> bool:
    return any(
        getattr(each, "_compiled_call_impl", None) is not None or hasattr(each, "_orig_mod")
        for each in module.modules()
    )

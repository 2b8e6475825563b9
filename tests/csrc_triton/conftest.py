"""Run the kernels in Triton's interpreter, whatever was imported before and without a variable.

`triton.jit` decides at import time whether a function is compiled or interpreted, and another test
may have imported Triton first. So the compiled functions are swapped for interpreted ones here, for
the duration of a test, in the modules that hold them.
"""

from __future__ import annotations

import importlib
import types
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import triton.experimental.gluon  # noqa: F401  imported at the first launch, and it wants tl as it was
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_MODULES = [
    importlib.import_module(f"csrc_triton.{name}")
    for name in (
        "activation_stats",
        "chunk_places",
        "dtypes",
        "exact_stats",
        "finite",
        "gradient_runs",
        "histogram",
        "nonfinite_counts",
        "partials",
        "sampled_stats",
        "snapshot",
        "tables",
    )
]


@pytest.fixture(scope="module")
def launches() -> Iterator[Counter[str]]:
    """Interpret all kernels of the module's tests; counts the launches of each kernel."""
    counted: Counter[str] = Counter()
    patch = pytest.MonkeyPatch()
    real_patch_lang = interpreter._patch_lang
    depth = [0]

    class Scope:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def restore(self) -> None:
            depth[0] -= 1
            self.inner.restore()

    def keep_promise(value: tl.tensor, divisor: int) -> tl.tensor:
        # The interpreter ignores this hint; on a GPU a false one is a misaligned access.
        assert not (value.handle.data % divisor).any(), f"an address is not a multiple of {divisor}"
        return value

    def patch_lang_once(_: object) -> object:
        # Upstream patches the language again at each call of a device function, 1 ms each, and
        # does not undo it. Once per launch is enough.
        if depth[0]:
            return None
        depth[0] += 1
        everywhere = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
        scope = Scope(real_patch_lang(everywhere))
        tl.multiple_of = keep_promise
        return scope

    class Counting(interpreter.InterpretedFunction):
        def run(self, *args: object, **kwargs: object) -> object:
            counted[self.fn.__name__] += 1
            # NaN and overflow are what the tests feed in; numpy need not mention them.
            with np.errstate(all="ignore"):
                return super().run(*args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", patch_lang_once)
    for module in (*_MODULES, tl, tl.standard, tl.core, tl.math):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                patch.setattr(module, name, Counting(value.fn))
    yield counted
    patch.undo()

"""Hooks on a user's modules that do not follow the module into a copy or a file."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class OwnHook:
    """Base of the hooks that the monitor registers on modules.

    `copy.deepcopy(model)` and `torch.save(model)` also copy the hooks of a module. A copy of this
    one is a function of the standard library that accepts any arguments and does nothing, so a
    copied model belongs to no monitor, and a saved one can be loaded without distmon.
    """

    owner: Any = None
    """The monitor that the hook reports to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

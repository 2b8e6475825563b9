"""Hooks on a user's modules that do not follow the module into a copy or a file."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final, Protocol

OWNER: Final = "_monitor_mark"
"""Attribute of an observed model that names its monitor."""


class Removable(Protocol):
    """A handle of installed hooks."""

    def remove(self) -> None:
        """Remove the hooks."""


class Calls:
    """Notes whether a module was called; may outlive the module."""

    __slots__ = ("any",)

    def __init__(self) -> None:
        self.any = False


class OwnHook:
    """Base of the hooks that the monitor registers on modules.

    `copy.deepcopy(model)` and `torch.save(model)` also copy the hooks of a module. A copy of this
    one is a function of the standard library that accepts any arguments and does nothing, so a
    copied model belongs to no monitor, and a saved one can be loaded without distmon.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class OwnerMark(OwnHook):
    """Names the monitor of a model, in an attribute of the model."""

    def __init__(self, model: Any, owner: Any) -> None:
        self._model = weakref.ref(model)  # the monitor must not keep the model
        self.owner = owner
        self.calls = Calls()
        model.__dict__[OWNER] = self

    def remove(self) -> None:
        """Remove the attribute, unless it names another monitor by now."""
        model = self._model()
        if model is not None and model.__dict__.get(OWNER) is self:
            del model.__dict__[OWNER]


class SwitchedHooks:
    """Hooks of modules that are installed only while they are needed.

    A module with a hook takes a longer way through its call, some microseconds of cold code.
    """

    def __init__(
        self, install: Callable[[], Iterable[Removable]], removable: Callable[[], bool]
    ) -> None:
        """`install` yields each hook once it is installed; `removable`: they may be removed now.

        Installs them: a model that is compiled keeps the hooks that it was traced with.
        """
        self._install = install
        self._removable = removable
        self._hooks: list[Removable] = []
        self.switch(True)

    def switch(self, wanted: bool) -> None:
        """Install the hooks, or remove them."""
        if wanted == bool(self._hooks):
            return
        if wanted:
            try:
                for hook in self._install():
                    self._hooks.append(hook)
            except BaseException:
                self.remove()  # those before the one that raised
                raise
        elif self._removable():
            self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

"""Hooks on a user's modules that do not follow the module into a copy or a file."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final, Protocol

from torch.utils.hooks import RemovableHandle

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


class KeptHook:
    """A hook of a module or tensor that is removed and put back at every observation.

    It keeps its entry in torch's table of hooks: to register it anew would take some microseconds
    of cold code, and to put it back takes a tenth of that.
    """

    __slots__ = ("_extra", "_first", "_hook", "_key", "_table")

    def __init__(self, handle: RemovableHandle, first: bool = False) -> None:
        """`handle` of a registered hook; `first`: it runs before those that are there."""
        self._key = handle.id
        self._table: Callable[[], Any] = handle.hooks_dict_ref
        table: Any = self._table()
        self._hook = table[self._key]
        self._first = first
        self._extra = [ref for ref in handle.extra_dict_ref if self._key in (ref() or ())]

    def put_back(self) -> bool:
        """Let the hook run again; return False where its module or tensor no longer exists."""
        table = self._table()
        if table is None:
            return False
        table[self._key] = self._hook
        if self._first:
            table.move_to_end(self._key, last=False)
        for extra in self._extra:
            if (marks := extra()) is not None:
                marks[self._key] = True
        return True

    def remove(self) -> None:
        """Let the hook run no more, until it is put back. Safe to call twice."""
        table = self._table()
        if table is not None:
            table.pop(self._key, None)
        for extra in self._extra:
            if (marks := extra()) is not None:
                marks.pop(self._key, None)


class KeptHooks:
    """Several hooks that are removed and put back together."""

    def __init__(self, register: Callable[[], Iterable[KeptHook]]) -> None:
        """`register` yields each hook once it is registered; called at the first `install`."""
        self._register = register
        self._hooks: list[KeptHook] = []
        self._registered = False
        self.installed = False

    def install(self) -> None:
        """Let the hooks run. Safe to call twice."""
        if self.installed:
            return
        self.installed = True
        if self._registered:
            for hook in self._hooks:
                hook.put_back()
        else:
            for hook in self._register():
                self._hooks.append(hook)  # one by one: the next one may raise
            self._registered = True

    def remove(self) -> None:
        """Let the hooks run no more. Safe to call twice."""
        self.installed = False
        for hook in self._hooks:
            hook.remove()
        if not self._registered:  # one of them could not be registered
            self._hooks = []


class SwitchedHooks:
    """Hooks of modules that are installed only while they are needed.

    A module with a hook takes a longer way through its call, some microseconds of cold code.
    """

    def __init__(
        self, install: Callable[[], Iterable[KeptHook]], removable: Callable[[], bool]
    ) -> None:
        """`install` yields each hook once it is installed; `removable`: they may be removed now.

        Installs them: a model that is compiled keeps the hooks that it was traced with.
        """
        self._removable = removable
        self._hooks = KeptHooks(install)
        self.switch(True)

    def switch(self, wanted: bool) -> None:
        """Install the hooks, or remove them."""
        if wanted == self._hooks.installed:
            return
        if wanted:
            try:
                self._hooks.install()
            except BaseException:
                self.remove()  # those before the one that raised
                raise
        elif self._removable():
            self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

"""Hooks on a user's modules that do not follow the module into a copy or a file."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final, Protocol

from torch.utils.hooks import RemovableHandle

from distmon.native import HookEntry, NativeModule

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

    __slots__ = ("entry",)

    def __init__(self, handle: RemovableHandle, first: bool = False) -> None:
        """`handle` of a registered hook; `first`: it runs before those that are there."""
        key, table = handle.id, handle.hooks_dict_ref
        extra = tuple(ref for ref in handle.extra_dict_ref if key in (ref() or ()))
        hooks: Any = table()
        self.entry: HookEntry = (table, key, hooks[key], first, extra)

    def put_back(self) -> None:
        """Let the hook run again, unless its module or tensor no longer exists."""
        reference, key, hook, first, extra = self.entry
        table = reference()
        if table is None:
            return
        table[key] = hook
        if first:
            table.move_to_end(key, last=False)
        for each in extra:
            if (marks := each()) is not None:
                marks[key] = True

    def remove(self) -> None:
        """Let the hook run no more, until it is put back. Safe to call twice."""
        reference, key, _, _, extra = self.entry
        for each in (reference, *extra):
            if (table := each()) is not None:
                table.pop(key, None)


class KeptHooks:
    """Several hooks that are removed and put back together."""

    def __init__(
        self, register: Callable[[], Iterable[KeptHook]], native: NativeModule | None = None
    ) -> None:
        """`register` yields each hook once it is registered; called at the first `install`.

        `native` takes a tenth of the time.
        """
        self._register = register
        self._native = native
        self._hooks: list[KeptHook] = []
        self._entries: tuple[HookEntry, ...] = ()
        self._registered = False
        self.installed = False

    def install(self) -> None:
        """Let the hooks run. Safe to call twice."""
        if self.installed:
            return
        self.installed = True
        if self._registered:
            self._switch_all(True)
        else:
            for hook in self._register():
                self._hooks.append(hook)  # one by one: the next one may raise
            self._entries = tuple(hook.entry for hook in self._hooks)
            self._registered = True

    def remove(self) -> None:
        """Let the hooks run no more. Safe to call twice."""
        if not self.installed:
            return
        self._switch_all(False)
        self.installed = False
        if not self._registered:  # one of them could not be registered
            self._hooks = []

    def _switch_all(self, on: bool) -> None:
        if self._native is not None and self._registered:
            self._native.switch_hooks(self._entries, on)
            return
        for hook in self._hooks:
            if on:
                hook.put_back()
            else:
                hook.remove()


class SwitchedHooks:
    """Hooks of modules that are installed only while they are needed.

    A module with a hook takes a longer way through its call, some microseconds of cold code.
    """

    def __init__(
        self,
        install: Callable[[], Iterable[KeptHook]],
        removable: Callable[[], bool],
        native: NativeModule | None = None,
    ) -> None:
        """`install` yields each hook once it is installed; `removable`: they may be removed now.

        Installs them: a model that is compiled keeps the hooks that it was traced with. `native`:
        see `KeptHooks`.
        """
        self._removable = removable
        self._hooks = KeptHooks(install, native)
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

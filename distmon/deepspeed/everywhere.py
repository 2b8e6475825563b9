"""`enable` and `disable`: every engine of this process whose config asks for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

from distmon.deepspeed.attaching import attach_by_block
from distmon.deepspeed.block import settings_in
from distmon.deepspeed.initializing import initialize_with
from distmon.deepspeed.replaced import Replaced
from distmon.layout.deepspeed import import_deepspeed

log = logging.getLogger("distmon")

_PATCH = "__distmon_enabled__"
"""Attribute of the deepspeed module while `enable` is in force."""
_ON_THE_WAY = ("_take_model_step", "backward", "load_checkpoint")
"""Methods that an engine goes through before its first step is over."""


class Enabled:
    """Watches engines as they are made, or when they first do something."""

    def __init__(self, deepspeed: Any) -> None:
        self._deepspeed = deepspeed
        self._replaced = Replaced()
        self._seen: WeakSet[Any] = WeakSet()

    def begin(self) -> None:
        """Replace `deepspeed.initialize` and, for scripts that hold on to the function itself or
        have an engine already, some methods of the engine's class."""
        self._replaced.put(self._deepspeed, "initialize", self._attaching)
        engine_class = self._deepspeed.DeepSpeedEngine
        for name in _ON_THE_WAY:
            self._replaced.put(engine_class, name, partial(self._looking_first, name))

    def end(self) -> None:
        """Put DeepSpeed back as it was; engines that are watched stay so."""
        self._replaced.undo()

    def _attaching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            made = initialize_with(original, *args, **kwargs)
            self._note(made[0])
            return made

        return initialize

    def _looking_first(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine in self._seen:
                return original(engine, *args, **kwargs)
            attach_by_block(engine)
            self._note(engine)
            # Attaching may have given the engine a method of its own, which is to be used now.
            return getattr(engine, name)(*args, **kwargs)

        return method

    def _note(self, engine: Any) -> None:
        self._seen.add(engine)
        settings = settings_in(engine.config)
        if settings is not None and not settings.enabled:
            disable()


def enable() -> None:
    """From now on `deepspeed.initialize` honours a `"distmon"` block in its config.

    Call it once, on every rank, before the first step of the first engine; it does not matter
    whether the script imported `initialize` by name before, or has made its engine already. A block
    with `"enabled": false` switches it off again for the whole process.
    """
    deepspeed = import_deepspeed()
    if not hasattr(deepspeed, _PATCH):
        enabled = Enabled(deepspeed)
        enabled.begin()
        setattr(deepspeed, _PATCH, enabled)


def disable() -> None:
    """Undo `enable`. Engines that are watched already stay so; see `detach`."""
    deepspeed = sys.modules.get("deepspeed")
    enabled = getattr(deepspeed, _PATCH, None)
    if isinstance(enabled, Enabled):
        enabled.end()
        delattr(deepspeed, _PATCH)

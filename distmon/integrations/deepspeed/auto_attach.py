"""`enable` and `disable`: attach to every engine of this process whose config has a block."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

from distmon.config import MonitorConfig
from distmon.integrations.deepspeed.attach_engine import attach_if_configured
from distmon.integrations.deepspeed.config_block import read_block
from distmon.integrations.deepspeed.wrapped_initialize import initialize_with
from distmon.integrations.patches import Patches
from distmon.layout.deepspeed import import_deepspeed

log = logging.getLogger("distmon")

_PATCH = "__distmon_enabled__"
"""Attribute of the deepspeed module after `enable`, until `disable`."""
_EARLY_METHODS = ("_take_model_step", "backward", "load_checkpoint")
"""Methods that every engine calls before the end of its first step."""


class AutoAttach:
    """Attaches to engines when they are created, or at their first call."""

    def __init__(self, deepspeed: Any, default: MonitorConfig | None = None) -> None:
        self._deepspeed = deepspeed
        self._default = default
        self._patches = Patches()
        self._seen: WeakSet[Any] = WeakSet()

    def begin(self) -> None:
        """Patch `deepspeed.initialize` and some methods of the engine class.

        The methods cover scripts that imported `initialize` by name or already have an engine.
        """
        self._patches.apply(self._deepspeed, "initialize", self._attaching)
        engine_class = self._deepspeed.DeepSpeedEngine
        for name in _EARLY_METHODS:
            self._patches.apply(engine_class, name, partial(self._attaching_first, name))

    def end(self) -> None:
        """Remove the patches; engines with a monitor keep it."""
        self._patches.undo()

    def _attaching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            made = initialize_with(original, *args, **kwargs)
            attach_if_configured(made[0], self._default)
            self._note(made[0])
            return made

        return initialize

    def _attaching_first(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine in self._seen:
                return original(engine, *args, **kwargs)
            attach_if_configured(engine, self._default)
            self._note(engine)
            # Attaching may have patched this method on the engine, so look it up again.
            return getattr(engine, name)(*args, **kwargs)

        return method

    def _note(self, engine: Any) -> None:
        self._seen.add(engine)
        settings = read_block(engine.config)
        if settings is not None and not settings.enabled:
            disable()


def enable(default: MonitorConfig | None = None) -> None:
    """Make `deepspeed.initialize` attach a monitor if its config has a `"distmon"` block.

    With `default`, also if it has none: then with these settings.

    Call it once, on every rank, before the first step of the first engine; it also works if the
    script has already imported `initialize` by name or created its engine. A block with
    `"enabled": false` disables it again for the whole process.
    """
    deepspeed = import_deepspeed()
    if not hasattr(deepspeed, _PATCH):
        enabled = AutoAttach(deepspeed, default)
        enabled.begin()
        setattr(deepspeed, _PATCH, enabled)


def disable() -> None:
    """Undo `enable`. Engines with a monitor keep it; see `detach`."""
    deepspeed = sys.modules.get("deepspeed")
    enabled = getattr(deepspeed, _PATCH, None)
    if isinstance(enabled, AutoAttach):
        enabled.end()
        delattr(deepspeed, _PATCH)

"""`initialize`: what takes the place of `deepspeed.initialize`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from distmon.deepspeed.attaching import attach_by_block
from distmon.deepspeed.block import settings_of_call
from distmon.layout.deepspeed import import_deepspeed


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, and a monitor on the engine when the config has a `"distmon"` block.

    Takes and returns what `deepspeed.initialize` does. A mistake in the block is a `ConfigError`
    before the engine is built.
    """
    return initialize_with(import_deepspeed().initialize, *args, **kwargs)


def initialize_with(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`, DeepSpeed's own, and attach to the engine that it makes."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    config = given.get("config")
    settings_of_call(given.get("config_params") if config is None else config, given.get("args"))
    made = original(*args, **kwargs)
    attach_by_block(made[0])
    return made

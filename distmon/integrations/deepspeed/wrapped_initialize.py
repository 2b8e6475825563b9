"""`initialize`: `deepspeed.initialize` with a monitor attached to the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from distmon.integrations.deepspeed.attach_engine import attach_if_configured
from distmon.integrations.deepspeed.config_block import read_block_of_call
from distmon.layout.deepspeed import import_deepspeed


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize`, and attach a monitor if the config has a `"distmon"` block.

    Arguments and result are those of `deepspeed.initialize`. Raises ConfigError for an invalid
    block, before the engine is built.
    """
    return initialize_with(import_deepspeed().initialize, *args, **kwargs)


def initialize_with(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original`, DeepSpeed's own function, and attach to the engine that it returns."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    config = given.get("config")
    read_block_of_call(given.get("config_params") if config is None else config, given.get("args"))
    made = original(*args, **kwargs)
    attach_if_configured(made[0])
    return made

"""The `"distmon"` block of a DeepSpeed config.

DeepSpeed takes any key without a word, so a mistake in the block has to be found here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmon.config import MonitorConfig, load_config
from distmon.errors import ConfigError

BLOCK = "distmon"


def settings_in(config: Any) -> MonitorConfig | None:
    """The settings of the block in a DeepSpeed config; None when there is no block."""
    if not isinstance(config, Mapping) or config.get(BLOCK) is None:
        return None
    block = config[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'the "{BLOCK}" block of the DeepSpeed config must hold keys and values, not '
            f"{json.dumps(block, default=str)}"
        )
    try:
        return load_config(block)
    except ConfigError as error:
        raise ConfigError(f'{error} (in the "{BLOCK}" block of the DeepSpeed config)') from None


def settings_of_call(config: Any, args: Any) -> MonitorConfig | None:
    """The settings in what a script gives to `deepspeed.initialize`: a mapping or a path.

    Looked at before an engine is built, which takes a while. Whatever is wrong with the file
    itself is for DeepSpeed to say.
    """
    given = getattr(args, "deepspeed_config", None) if config is None else config
    if isinstance(given, str | Path):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    return settings_in(given)

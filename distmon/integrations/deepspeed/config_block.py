"""The `"distmon"` block of a DeepSpeed config.

DeepSpeed ignores unknown keys, so the block is validated here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmon.config import MonitorConfig, load_config
from distmon.errors import ConfigError

BLOCK = "distmon"


def read_block(config: Any) -> MonitorConfig | None:
    """Return the settings of the block in a DeepSpeed config; None when there is no block.

    Raises ConfigError for an invalid block.
    """
    if not isinstance(config, Mapping) or config.get(BLOCK) is None:
        return None
    block = config[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'the "{BLOCK}" block of the DeepSpeed config must be an object with keys, not '
            f"{json.dumps(block, default=str)}"
        )
    try:
        return load_config(block)
    except ConfigError as error:
        raise ConfigError(f'{error} (in the "{BLOCK}" block of the DeepSpeed config)') from None


def read_block_of_call(config: Any, args: Any) -> MonitorConfig | None:
    """Return the settings in the config passed to `deepspeed.initialize`: a mapping or a path.

    It is read before the engine is built, which takes a while. Errors in the file itself are left
    to DeepSpeed to report.
    """
    given = getattr(args, "deepspeed_config", None) if config is None else config
    if isinstance(given, str | Path):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    return read_block(given)

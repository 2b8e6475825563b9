"""Read the configuration from a dict, a YAML or JSON file, or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from distmon.config.mistakes import explain
from distmon.config.settings import MonitorConfig
from distmon.errors import ConfigError
from distmon.untrusted.documents import check_plain, parse_json, parse_yaml
from distmon.untrusted.files import read_regular

ENV_PREFIX = "DISTMON_"
LARGEST_FILE: Final = 256 << 10
"""Bytes of a config file."""


def load_config(
    source: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> MonitorConfig:
    """Build the configuration; later sources win: `source`, then the environment, then `overrides`.

    `source` is a `MonitorConfig`, a mapping, or a path ending in .yaml, .yml or .json. Environment
    variables are `DISTMON_INTERVAL`, or `DISTMON_RULES__FROZEN__PATIENCE` for nested keys.
    """
    if isinstance(source, MonitorConfig):
        values = source.model_dump(exclude_unset=True)
        origin = "the distmon config"
    elif isinstance(source, Mapping):
        values = dict(source)
        origin = "the distmon config"
    elif source is None:
        values, origin = {}, "the distmon config"
    else:
        values, origin = read_config_file(Path(source)), str(source)
    values = _merge(values, _from_environment(os.environ if environ is None else environ))
    values = _merge(values, dict(overrides or {}))
    try:
        return MonitorConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, MonitorConfig, origin)) from None


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file."""
    try:
        text = read_regular(path, LARGEST_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from None
    try:
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        check_plain(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:] or 'YAML'}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(content).__name__}")
    return content


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable.removeprefix(ENV_PREFIX).lower().split("__")
        section = values
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"the environment variable {variable} sets a key inside of {part}, which "
                    "another variable sets to a value"
                )
        try:
            section[path[-1]] = parse_yaml(text)
            check_plain(section[path[-1]])
        except ValueError:
            raise ConfigError(
                f"the environment variable {variable} does not hold a valid YAML value"
            ) from None
    return values


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged

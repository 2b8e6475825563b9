"""Settings of the rules to replay: the defaults, those of a file, or those of the run itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from distmon.config import MonitorConfig, RuleConfig, explain, read_config_file
from distmon.errors import ConfigError
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule

Settings = Mapping[str, RuleConfig]
"""Settings by rule name."""


def load_rules(path: Path) -> Settings:
    """Load the rules of a YAML or JSON file: a whole monitor config, or its `rules` alone."""
    content = read_config_file(path)
    if set(content) & set(MonitorConfig.model_fields):
        return _validated(content, str(path))
    return _validated({"rules": content}, str(path))


def as_settings(rules: Mapping[str, Any], origin: str = "the rules") -> Settings:
    """Validate plain values, such as `{"frozen": {"patience": 1}}`."""
    return _validated({"rules": dict(rules)}, origin)


def settings_of_run(info: Mapping[str, Any], origin: str) -> tuple[Settings, tuple[str, ...]]:
    """Return the rule settings in `run.json`, and the names of rules that are Python functions.

    A run folder does not contain functions, so these cannot be replayed.
    """
    given = as_settings(info.get("config", {}).get("rules", {}), origin)
    known = {rule.name for rule in BUILTIN}
    functions = tuple(
        name for name, rule in given.items() if name not in known and rule.when is None
    )
    return {name: rule for name, rule in given.items() if name not in functions}, functions


def activate(settings: Settings, own_rules: Sequence[Rule] = ()) -> list[ActiveRule]:
    """Return all enabled rules; raise ConfigError for an unknown rule or threshold."""
    return configure(with_users_rules(BUILTIN, settings, own_rules), settings)


def _validated(content: Mapping[str, Any], origin: str) -> Settings:
    try:
        return MonitorConfig.model_validate(content).rules
    except ValidationError as error:
        raise ConfigError(explain(error, MonitorConfig, origin)) from None

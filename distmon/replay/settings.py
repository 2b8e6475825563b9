"""Which rules are replayed: distmon's own, those of a file, or those that the run itself had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from distmon.config import MonitorConfig, RuleConfig, explain, read_config_file
from distmon.errors import ConfigError
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule

Settings = Mapping[str, RuleConfig]
"""Settings by rule name."""
FIXED: Final = "frozen.ratio"
"""The one threshold that is applied while a run is recorded."""


def load_rules(path: Path) -> Settings:
    """The rules of a YAML or JSON file: a whole monitor config, or its `rules` alone."""
    content = read_config_file(path)
    if set(content) & set(MonitorConfig.model_fields):
        return _validated(content, str(path))
    return _validated({"rules": content}, str(path))


def as_settings(rules: Mapping[str, Any], origin: str = "the rules") -> Settings:
    """Settings out of plain values, such as `{"frozen": {"patience": 1}}`."""
    return _validated({"rules": dict(rules)}, origin)


def settings_of_run(info: Mapping[str, Any], origin: str) -> tuple[Settings, tuple[str, ...]]:
    """What `run.json` says about rules, and the names of those that are Python functions.

    Functions are not part of a run folder, so they cannot be replayed from there.
    """
    given = as_settings(info.get("config", {}).get("rules", {}), origin)
    known = {rule.name for rule in BUILTIN}
    gone = tuple(name for name, rule in given.items() if name not in known and rule.when is None)
    return {name: rule for name, rule in given.items() if name not in gone}, gone


def activate(settings: Settings, own_rules: Sequence[Rule] = ()) -> list[ActiveRule]:
    """All rules that are switched on; `ConfigError` for an unknown rule or threshold."""
    return configure(with_users_rules(BUILTIN, settings, own_rules), settings)


def fixed_while_recording(recorded: Settings, active: Sequence[ActiveRule]) -> str | None:
    """What these rules ask of a run folder that it cannot give, in one sentence.

    Whether a parameter moved is decided by the observation, which sees more than it writes down.
    """
    default = next(rule.thresholds["ratio"].value for rule in BUILTIN if rule.name == "frozen")
    given = recorded.get("frozen", RuleConfig()).model_extra or {}
    then = float(given.get("ratio", default))
    now = next((rule.limits["ratio"] for rule in active if rule.rule.name == "frozen"), then)
    return None if now == then else f"{FIXED} is not {now:g}, but {then:g} as it was recorded with"


def _validated(content: Mapping[str, Any], origin: str) -> Settings:
    try:
        return MonitorConfig.model_validate(content).rules
    except ValidationError as error:
        raise ConfigError(explain(error, MonitorConfig, origin)) from None

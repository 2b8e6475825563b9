"""Every source of configuration, and one clear sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distmon.config import MonitorConfig, load_config
from distmon.errors import ConfigError
from distmon.rules import BUILTIN, configure


def test_defaults() -> None:
    config = load_config(environ={})
    assert (config.interval, config.sample_size, config.topk) == (100, "auto", 5)
    assert config.ema_decay == 0.99
    assert config.sinks == ("console", "jsonl", "arrow")


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "monitor.yaml"
    file.write_text("interval: 10\ntopk: 2\nrules: {frozen: {patience: 7, ratio: 1.0e-9}}\n")
    environ = {"DISTMON_TOPK": "3", "DISTMON_RULES__FROZEN__PATIENCE": "8", "OTHER": "x"}
    config = load_config(file, {"seed": 4, "rules": {"frozen": {"cooldown": 1}}}, environ)
    assert (config.interval, config.topk, config.seed) == (10, 3, 4)
    frozen = config.rules["frozen"]
    assert (frozen.patience, frozen.cooldown, frozen.model_extra) == (8, 1, {"ratio": 1e-9})


def test_json_mapping_and_ready_made(tmp_path: Path) -> None:
    file = tmp_path / "monitor.json"
    file.write_text(json.dumps({"interval": 7, "sinks": "console, jsonl"}))
    config = load_config(file, environ={})
    assert config.sinks == ("console", "jsonl")
    assert load_config({"interval": 7, "sinks": ["console", "jsonl"]}, environ={}) == config
    assert load_config(config, environ={}) == config
    assert load_config(config, {"interval": 8}, {}).interval == 8
    assert load_config({"sample_size": "exact"}, environ={}).sample_size == "exact"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"intervall": 5},
            'unknown key "intervall" in the distmon config; did you mean "interval"?',
        ),
        ({"zzz": 5}, 'unknown key "zzz" in the distmon config; valid keys are actions, backend'),
        (
            {"wandb": {"projekt": "x"}},
            'unknown key "wandb.projekt" in the distmon config; did you mean "project"?',
        ),
        ({"interval": 0}, 'bad value 0 for "interval" in the distmon config: input should be'),
        (
            {"sample_size": -5},
            'bad value -5 for "sample_size" in the distmon config: it must be a whole number of '
            'at least 1, "auto", "sampled" or "exact"',
        ),
        ({"sample_size": "all"}, "bad value 'all' for \"sample_size\""),
        ({"sinks": ["tensorbord"]}, "bad value 'tensorbord' for \"sinks.0\""),
        ({"ema_decay": 1.0}, 'bad value 1.0 for "ema_decay"'),
        ({"topk": "many"}, "bad value 'many' for \"topk\""),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values, environ={})
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_environment_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r'unknown key "intervals".*did you mean "interval"'):
        load_config(environ={"DISTMON_INTERVALS": "3"})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.yaml", None, "cannot read the config file .*absent.yaml: No such file"),
        ("broken.json", "{", "broken.json is not valid json: Expecting property name"),
        ("broken.yaml", "a: [", "broken.yaml is not valid yaml: while parsing"),
        ("list.yaml", "- a\n", "list.yaml must hold keys and values, not a list"),
        ("typo.yaml", "intervall: 3\n", 'unknown key "intervall" in .*typo.yaml; did you mean'),
    ],
)
def test_unreadable_files_are_named(
    tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        load_config(tmp_path / name, environ={})


def test_rule_settings_are_checked_against_the_rules() -> None:
    def rules(**settings: Any) -> MonitorConfig:
        return load_config({"rules": settings}, environ={})

    with pytest.raises(ConfigError, match='unknown rule "frozzen" in rules; did you mean "frozen"'):
        configure(BUILTIN, rules(frozzen={}).rules)
    with pytest.raises(ConfigError, match=r'unknown key "ration" in rules.frozen; .*"ratio"'):
        configure(BUILTIN, rules(frozen={"ration": 1}).rules)
    with pytest.raises(ConfigError, match=r'bad value .*"rules.frozen.ratio": it must be a number'):
        configure(BUILTIN, rules(frozen={"ratio": "small"}).rules)
    (spelt,) = [
        a
        for a in configure(BUILTIN, rules(frozen={"ratio": "1e-9"}).rules)
        if a.limits.get("ratio") == 1e-9
    ]
    assert spelt.rule.name == "frozen"
    active = configure(BUILTIN, rules(frozen={"enabled": False}).rules)
    assert "frozen" not in [a.rule.name for a in active]
    with pytest.raises(ConfigError, match=r'bad value 0 for "rules.frozen.patience"'):
        rules(frozen={"patience": 0})


def test_every_key_has_a_line_of_documentation() -> None:
    assert all(field.description for field in MonitorConfig.model_fields.values())

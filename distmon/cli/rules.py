"""`distmon rules`: print all rules with thresholds and advice."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distmon.cli.severity_colors import SEVERITY_COLORS
from distmon.config import load_config, suggest
from distmon.errors import ConfigError
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule


def print_rules(console: Console, config: Path | None, name: str | None = None) -> None:
    """Print every rule with the settings of `config` or the defaults; disabled ones as off.

    With a `name`, print only that rule, with what each threshold means.
    """
    settings = load_config(config).rules
    rules = with_users_rules(BUILTIN, settings)
    active = {a.rule.name: a for a in configure(rules, settings)}
    if name is not None:
        by_name = {rule.name: rule for rule in rules}
        if name not in by_name:
            raise ConfigError(f'there is no rule "{name}"; {suggest(name, [*by_name])}')
        _print_rule(console, by_name[name], active.get(name))
        return
    table = Table(title="distmon rules", show_lines=True)
    for heading in ("rule", "severity", "fires when", "thresholds", "patience", "cooldown"):
        table.add_column(heading, no_wrap=heading == "rule")
    table.add_column("advice", ratio=2)
    for rule in rules:
        setting = active.get(rule.name)
        if setting is None:
            off = Text("off", "dim")
            table.add_row(Text(rule.name), off, Text(rule.summary), "", "", "", "")
            continue
        severity = setting.severity or rule.severity
        advice = rule.advice
        table.add_row(
            Text(rule.name),
            Text(severity, SEVERITY_COLORS[severity]),
            Text(rule.summary),
            "\n".join(f"{name}: {value:g}" for name, value in setting.limits.items()),
            str(setting.patience),
            str(setting.cooldown),
            Text("\n".join(f"{i}. {text}" for i, text in enumerate(advice, 1))),
        )
    console.print(table)
    console.print(
        "patience and cooldown are counted in observations that have the rule's data, separately "
        "for each parameter, layer or task; alerts repeat after 1, 2, 4 and 8 cooldowns"
    )


def _print_rule(console: Console, rule: Rule, setting: ActiveRule | None) -> None:
    severity = rule.severity if setting is None else setting.severity or rule.severity
    state = "off" if setting is None else severity
    console.print(Text.assemble((rule.name, "bold"), " ", (state, SEVERITY_COLORS[severity])))
    console.print(Text(f"fires when {rule.summary}"))
    for key, threshold in rule.thresholds.items():
        value = threshold.value if setting is None else setting.limits[key]
        console.print(Text(f"  {key}: {value:g}  {threshold.help}"))
    if setting is not None:
        console.print(f"  patience: {setting.patience}  observations in a row before it fires")
        console.print(f"  cooldown: {setting.cooldown}  observations until it repeats")
    for number, text in enumerate(rule.advice, 1):
        console.print(Text(f"{number}. {text}"))

"""`distmon rules`: print all rules with thresholds and advice."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from distmon.cli.severity_colors import SEVERITY_COLORS
from distmon.config import load_config
from distmon.rules import BUILTIN, configure, with_users_rules


def print_rules(console: Console, config: Path | None) -> None:
    """Print every rule with the settings of `config` or the defaults; disabled ones as off."""
    settings = load_config(config).rules
    rules = with_users_rules(BUILTIN, settings)
    active = {a.rule.name: a for a in configure(rules, settings)}
    table = Table(title="distmon rules", show_lines=True)
    for heading in ("rule", "severity", "fires when", "thresholds", "patience", "cooldown"):
        table.add_column(heading, no_wrap=heading == "rule")
    table.add_column("advice", ratio=2)
    for rule in rules:
        setting = active.get(rule.name)
        if setting is None:
            table.add_row(rule.name, "[dim]off[/]", rule.summary, "", "", "", "")
            continue
        severity = setting.severity or rule.severity
        advice = rule.advice
        table.add_row(
            rule.name,
            f"[{SEVERITY_COLORS[severity]}]{severity}[/]",
            rule.summary,
            "\n".join(f"{name}: {value:g}" for name, value in setting.limits.items()),
            str(setting.patience),
            str(setting.cooldown),
            "\n".join(f"{i}. {text}" for i, text in enumerate(advice, 1)),
        )
    console.print(table)
    console.print(
        "patience and cooldown are counted in observations that have the rule's data, separately "
        "for each parameter, layer or task; alerts repeat after 1, 2, 4 and 8 cooldowns"
    )

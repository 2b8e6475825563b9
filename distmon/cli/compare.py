"""`distmon compare A B`: print what differs between runs, and which metrics are better or worse."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distmon.cli.severity_colors import SEVERITY_COLORS
from distmon.errors import ConfigError, RunFolderError
from distmon.replay import parse_map
from distmon.report.compare import Comparison, Condition, compare_runs, load_runs, parse_condition
from distmon.report.compare.compare_page import compare_page
from distmon.report.compare.comparison import alert_counts
from distmon.report.compare.verdicts import Axis
from distmon.runs.run_json import strict_json

_AXES: Final[dict[str, Axis]] = {"steps": "steps", "tokens": "tokens"}
_VERDICT_COLORS: Final = {"better": "green", "worse": "red", "higher": "cyan", "lower": "cyan"}
_SHOWN: Final = 10


@dataclass(frozen=True)
class CompareOptions:
    """The command line."""

    paths: Sequence[Path]
    by: str | None = None
    html: Path | None = None
    json: bool = False
    fail_if: Sequence[str] = ()
    maps: Sequence[str] = ()


def compare(console: Console, options: CompareOptions) -> int:
    """Print the comparison and return the exit code: 1 when a condition is met."""
    conditions = [parse_condition(text) for text in options.fail_if]
    if options.by is not None and options.by not in _AXES:
        raise ConfigError(f'--by must be steps or tokens, not "{options.by}"')
    runs = load_runs(options.paths, parse_map(options.maps))
    comparisons = compare_runs(runs, _AXES[options.by] if options.by else None)
    if options.html is not None:
        _write(options.html, compare_page(comparisons))
    failed = _failed(conditions, comparisons)
    if options.json:
        content = [each.to_dict() for each in comparisons]
        print(strict_json({"comparisons": content, "failed": failed}, indent=2))
    else:
        for each in comparisons:
            _print(console, each)
        for sentence in failed:
            console.print(Text.assemble(("failed", "red"), f" {sentence}"))
    return 1 if failed else 0


def _failed(conditions: Sequence[Condition], comparisons: Sequence[Comparison]) -> list[str]:
    found = []
    for condition in conditions:
        for each in comparisons:
            met = condition.met_by(each.quantities)
            if met is None:
                raise ConfigError(
                    f"--fail-if {condition.text}: {each.first.name} and {each.other.name} "
                    f"do not both have {condition.key}"
                )
            if met:
                found.append(f"{condition.text}: {each.other.name}")
    return found


def _print(console: Console, comparison: Comparison) -> None:
    title = f"{comparison.other.name} against {comparison.first.name}, at equal {comparison.axis}"
    table = Table(title=Text(title), title_justify="left")
    for heading in ("quantity", "first", "other", "change", "99% interval", "verdict"):
        table.add_column(heading, justify="left" if heading in ("quantity", "verdict") else "right")
    for each in comparison.quantities:
        interval = each.interval
        between = f"{interval[0]:+.2%} to {interval[1]:+.2%}" if interval else ""
        color = _VERDICT_COLORS.get(each.verdict, "dim")
        numbers = f"{each.first:.4g}", f"{each.other:.4g}", f"{each.change:+.2%}", between
        table.add_row(each.quantity.key, *numbers, Text(each.verdict, color))
    if comparison.quantities:
        console.print(table)
    else:
        console.print(Text(f"{title}: no metric in common"))
    _print_differences(console, comparison)
    for run in (comparison.first, comparison.other):
        for alert in alert_counts(run):
            color = SEVERITY_COLORS.get(alert["severity"], "white")
            where = f"in {run.name}: {alert['count']} x, first at step {alert['first_step']}"
            console.print(Text.assemble((alert["severity"], color), f" {alert['rule']} {where}"))
        for note in run.notes:
            console.print(Text(f"{run.name}: {note}", "yellow"))
    console.print()


def _print_differences(console: Console, comparison: Comparison) -> None:
    if comparison.differences:
        table = Table(title="what differs", title_justify="left")
        for heading in ("kind", "what", "first", "other"):
            table.add_column(heading)
        for each in comparison.differences[: 2 * _SHOWN]:
            cells = (each.kind, each.what, each.first, each.other)
            table.add_row(*(Text(_cut(cell)) for cell in cells))
        console.print(table)
        if (left := len(comparison.differences) - 2 * _SHOWN) > 0:
            console.print(f"{left} more differences: --json or --html")
    else:
        console.print("no setting, version or parameter differs")
    if comparison.params:
        table = Table(title="parameters that differ most in the second half", title_justify="left")
        for heading in ("parameter", "statistic", "factor", "first", "other"):
            table.add_column(heading, justify="left" if len(table.columns) < 2 else "right")
        for param in comparison.params[:_SHOWN]:
            numbers = f"x{param.factor:.3g}", f"{param.first:.3g}", f"{param.other:.3g}"
            table.add_row(Text(_cut(param.name)), param.metric, *numbers)
        console.print(table)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _write(path: Path, page: str) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(page, encoding="utf-8")
        os.replace(staged, path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}") from None

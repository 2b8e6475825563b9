"""Output of `distmon replay`: tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distmon.cli.severity_colors import SEVERITY_COLORS
from distmon.replay import Failure, Recording, Replay, Sweep, SweepPoint
from distmon.replay.settings import Settings
from distmon.replay.sweep import current_value
from distmon.rules.alert import Alert, Severity
from distmon.rules.base import name_some
from distmon.runs.run_json import strict_json

_MOST_COLUMNS: Final = 6
"""Maximum number of runs with their own column in the table of a sweep."""


@dataclass(frozen=True)
class ReplayedRun:
    """The results of one run, without its records so that many runs fit into memory."""

    name: str
    kind: str
    observations: int
    first_step: int | None
    last_step: int | None
    alerts: tuple[Alert, ...]
    severities: dict[Severity, int]
    rules: dict[str, tuple[int, float, int]]
    """Alerts, share of observations and first step of each rule that fired."""
    alarm_share: float
    first_alarm: int | None
    failures: tuple[Failure, ...]
    idle: tuple[str, ...]
    sweeps: tuple[tuple[SweepPoint, ...], ...]
    """One row of points for each sweep."""
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        recording: Recording,
        replay: Replay,
        sweeps: tuple[tuple[SweepPoint, ...], ...],
        notes: tuple[str, ...],
    ) -> ReplayedRun:
        """Summarize a replay."""
        steps = [record.step for record in replay.records]
        return cls(
            name=recording.name,
            kind=recording.kind,
            observations=replay.observations,
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            alerts=replay.alerts,
            severities=replay.by_severity(),
            rules={
                rule: (len(alerts), replay.share(alerts), alerts[0].step)
                for rule, alerts in replay.by_rule().items()
            },
            alarm_share=replay.alarm_share,
            first_alarm=min((alert.step for alert in replay.alarms), default=None),
            failures=replay.failures,
            idle=replay.idle,
            sweeps=sweeps,
            notes=notes,
        )


def print_one(console: Console, run: ReplayedRun) -> None:
    """Print all results of one run."""
    span = f", steps {run.first_step} to {run.last_step}" if run.observations else ""
    console.print(Text(f"{run.name}: {run.kind}, {run.observations} observations{span}"))
    if run.alerts:
        console.print(_alerts(run.alerts))
        console.print(_rules(run))
        console.print(
            f"{_counts(run.severities)}; {run.alarm_share:.1%} of the observations raised an alarm "
            "(warning or critical)",
            highlight=False,
        )
    else:
        console.print("no rule would have fired", style="green")
    if run.idle:
        names = ", ".join(run.idle)
        console.print(Text(f"rules without data in this recording: {names}"))
    _print_remarks(console, run)


def short_names(runs: Sequence[ReplayedRun]) -> tuple[str, list[str]]:
    """Return the common folder of all runs, and their names relative to it."""
    parts = [run.name.split("/") for run in runs]
    levels = zip(*(each[:-1] for each in parts), strict=False)
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return "/".join(shared), ["/".join(each[len(shared) :]) for each in parts]


def print_runs(console: Console, runs: Sequence[ReplayedRun]) -> None:
    """Print one row per run, and a footer with the totals."""
    folder, names = short_names(runs)
    title = Text(f"runs in {folder}") if folder else None
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, show_footer=len(runs) > 1)
    severities: tuple[Severity, ...] = ("critical", "warning", "info")
    totals = {s: sum(run.severities[s] for run in runs) for s in severities}
    observations = sum(run.observations for run in runs)
    alarmed = sum(run.alarm_share * run.observations for run in runs)
    table.add_column("run", footer=f"all {len(runs)}", overflow="fold")
    table.add_column("observations", footer=str(observations), justify="right")
    table.add_column("last step", justify="right")
    for severity in severities:
        table.add_column(severity, footer=str(totals[severity]), justify="right")
    table.add_column("alarm share", footer=f"{alarmed / max(1, observations):.1%}", justify="right")
    table.add_column("first alarm", justify="right")
    table.add_column("rules", overflow="fold")
    for run, name in zip(runs, names, strict=True):
        table.add_row(
            Text(name),
            str(run.observations),
            _step(run.last_step),
            *(str(run.severities[severity]) for severity in severities),
            f"{run.alarm_share:.1%}",
            _step(run.first_alarm),
            Text(", ".join(run.rules)),
        )
    console.print(table)
    for run in runs:
        if run.failures or run.notes:
            console.print(Text(f"{run.name}:"))
            _print_remarks(console, run)


def print_sweep(
    console: Console,
    sweep: Sweep,
    points: Sequence[tuple[ReplayedRun, Sequence[SweepPoint]]],
    settings: Settings,
) -> None:
    """Print one row per value: alerts and the step of the first one, by run and in total."""
    table = Table(
        title=Text(f"alerts of {sweep.rule} (first step)"), box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column(sweep.key, justify="right")
    shown = points if len(points) <= _MOST_COLUMNS else []
    for name in short_names([run for run, _ in shown])[1]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for heading in ("all runs", "runs with one", "share of observations"):
        table.add_column(heading, justify="right")
    now = current_value(sweep, settings)
    observations = sum(run.observations for run, _ in points)
    for i, value in enumerate(sweep.values):
        column = [row[i] for _, row in points]
        raised = sum(row[i].share * run.observations for run, row in points)
        table.add_row(
            f"{value:g}" + (" (now)" if value == now else ""),
            *(_cell(row[i]) for _, row in shown),
            str(sum(point.alerts for point in column)),
            f"{sum(point.alerts > 0 for point in column)} of {len(column)}",
            f"{raised / max(1, observations):.1%}",
        )
    console.print(table)


def as_json(runs: Sequence[ReplayedRun], sweeps: Sequence[Sweep], unreadable: Sequence[str]) -> str:
    """Return all results as JSON."""
    return strict_json(
        {"runs": [_entry(run, sweeps) for run in runs], "unreadable": list(unreadable)}, indent=2
    )


def _entry(run: ReplayedRun, sweeps: Sequence[Sweep]) -> dict[str, Any]:
    return {
        "name": run.name,
        "kind": run.kind,
        "observations": run.observations,
        "first_step": run.first_step,
        "last_step": run.last_step,
        "severities": run.severities,
        "alarm_share": run.alarm_share,
        "first_alarm": run.first_alarm,
        "rules": {
            rule: {"alerts": count, "share": share, "first_step": first}
            for rule, (count, share, first) in run.rules.items()
        },
        "alerts": [alert.to_dict() for alert in run.alerts],
        "failures": [vars(failure) for failure in run.failures],
        "idle": list(run.idle),
        "sweeps": {
            sweep.name: [vars(point) for point in points]
            for sweep, points in zip(sweeps, run.sweeps, strict=True)
        },
        "notes": list(run.notes),
    }


def _alerts(alerts: Sequence[Alert]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column("severity")
    table.add_column("rule", no_wrap=True)
    table.add_column("where", overflow="fold", max_width=30)
    table.add_column("message", overflow="fold")
    for alert in alerts:
        table.add_row(
            str(alert.step),
            Text(alert.severity, SEVERITY_COLORS[alert.severity]),
            Text(alert.rule),
            Text(_where(alert)),
            Text(alert.message),
        )
    return table


def _where(alert: Alert) -> str:
    parts = [name_some(alert.params or alert.layers, 1)]
    if alert.ranks:
        parts.append(f"rank {name_some([str(rank) for rank in alert.ranks])}")
    return ", ".join(filter(None, parts))


def _rules(run: ReplayedRun) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule")
    for heading in ("alerts", "share of observations", "first step"):
        table.add_column(heading, justify="right")
    for rule, (count, share, first) in run.rules.items():
        table.add_row(Text(rule), str(count), f"{share:.1%}", str(first))
    return table


def _print_remarks(console: Console, run: ReplayedRun) -> None:
    for failure in run.failures:
        console.print(
            Text(
                f"rule {failure.rule} failed on {failure.count} of {run.observations} "
                f"observations, first at step {failure.step}: {failure.error}",
                "red",
            )
        )
    for note in run.notes:
        console.print(Text(note, "yellow"))


def _counts(severities: dict[Severity, int]) -> str:
    return ", ".join(f"{count} {severity}" for severity, count in severities.items())


def _cell(point: SweepPoint) -> str:
    return str(point.alerts) if point.first_step is None else f"{point.alerts} ({point.first_step})"


def _step(step: int | None) -> str:
    return "" if step is None else str(step)

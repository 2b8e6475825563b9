"""`distmon show RUN`: print a summary of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distmon.runs.reader import Run, read_run
from distmon.sinks.console import opening_line

_COLUMNS = {
    "loss": "train/step_loss",
    "ema": "train/step_loss_ema",
    "update ratio": "monitor/update_ratio_median",
    "max": "monitor/update_ratio_max",
    "grad norm": "monitor/grad_norm",
    "frozen": "monitor/frozen_count",
    "lr": "train/lr",
    "tok/s": "performance/tokens_per_second",
}


def print_run(console: Console, path: Path, last: int) -> None:
    """Print the last records, the alerts, and the parts that could not be read."""
    run = read_run(path)
    table = Table(title=str(path))
    table.add_column("step", justify="right")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for record in run.records[-last:]:
        values = (_number(record["metrics"].get(tag)) for tag in _COLUMNS.values())
        table.add_row(str(record["step"]), *values)
    console.print(table)
    console.print(_content(run))
    if reading := run.info.get("reading"):
        interval = int(run.info["config"].get("interval", 0))
        line = opening_line(reading, len(run.info["parameters"]), interval)
        console.print(escape(line.removeprefix("distmon: ")))
    for alert in run.alerts:
        console.print(
            f"[bold]{alert['severity']}[/] {alert['rule']} at step {alert['step']}: "
            f"{escape(alert['message'])}"
        )
    for problem in run.problems:
        console.print(f"[yellow]{escape(problem)}[/]")


def _content(run: Run) -> str:
    attempts = run.info["attempts"]
    ranks = attempts[-1]["world_size"] if attempts else 0
    return (
        f"{len(run.records)} records, {run.params.num_rows} parameter rows of "
        f"{len(run.info['parameters'])} parameters, {len(run.alerts)} alerts, "
        f"{len(attempts)} attempts, {ranks} ranks in the last; "
        + ("all files are intact" if not run.problems else "some entries could not be read:")
    )


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}"

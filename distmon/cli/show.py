"""`distmon show RUN`: print a summary of a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distmon.errors import DistmonError
from distmon.runs.claim import CLAIM_FILE
from distmon.runs.reader import Run, read_run
from distmon.runs.run_json import RUN_FILE
from distmon.sinks.console import opening_line
from distmon.sinks.short_numbers import plural
from distmon.untrusted.files import is_file

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
    if not is_file(path / RUN_FILE) and (found := _run_folders(path)):
        _print_runs(console, path, found)
        return
    run = read_run(path)
    table = Table(title=Text(str(path)))
    table.add_column("step", justify="right")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    rows = [(record["step"], _values(record)) for record in run.records]
    for step, values in [row for row in rows if any(row[1])][-last:]:
        table.add_row(str(step), *values)
    console.print(table)
    console.print(_content(run))
    if reading := run.info.get("reading"):
        interval = int(run.info["config"].get("interval", 0))
        line = opening_line(reading, len(run.info["parameters"]), interval)
        console.print(Text(line.removeprefix("distmon: ")))
    for alert in run.alerts:
        text = f" {alert['rule']} at step {alert['step']}: {alert['message']}"
        console.print(Text.assemble((alert["severity"], "bold"), text))
    for problem in run.problems:
        console.print(Text(problem, "yellow"))


def _content(run: Run) -> str:
    attempts = run.info["attempts"]
    ranks = attempts[-1]["world_size"] if attempts else 0
    return (
        f"{plural(len(run.records), 'record')}, {plural(run.params.num_rows, 'parameter row')} of "
        f"{plural(len(run.info['parameters']), 'parameter')}, {plural(len(run.alerts), 'alert')}, "
        f"{plural(len(attempts), 'attempt')}, {plural(ranks, 'rank')} in the last; "
        + ("not complete:" if run.problems else _complete(run))
    )


def _complete(run: Run) -> str:
    """Return what can be said when nothing is known to be missing."""
    if run.closed and not os.path.lexists(run.path / CLAIM_FILE):
        return "all files are intact and no record is missing"
    return (
        "nothing is missing up to the last record; the training still runs, was killed or did not "
        "note its end, and what it had not written by then is not known here"
    )


def _run_folders(path: Path) -> list[Path]:
    """Return the run folders directly in `path`, the newest last."""
    try:
        children = [child for child in path.iterdir() if not child.is_symlink()]
        found = [child for child in children if is_file(child / RUN_FILE)]
        return sorted(found, key=lambda child: (child / RUN_FILE).stat().st_mtime)
    except (OSError, ValueError):  # no folder, or one that changes at this moment
        return []


def _print_runs(console: Console, path: Path, folders: list[Path]) -> None:
    """Print one line for each run folder."""
    table = Table(title=Text(str(path)))
    for heading in ("run", "started", "last step", "loss", "records", "alerts"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for folder in folders:
        try:
            run = read_run(folder)
        except DistmonError as error:
            table.add_row(Text(folder.name), Text(str(error)))
            continue
        attempts = run.info["attempts"]
        step = max((*run.losses, *(record["step"] for record in run.records)), default=0)
        table.add_row(
            Text(folder.name),
            Text(attempts[-1]["started"][:16].replace("T", " ") if attempts else ""),
            str(step),
            _number(run.losses.get(step)),
            str(len(run.records)),
            str(len(run.alerts)),
        )
    console.print(table)


def _values(record: Mapping[str, Any]) -> list[str]:
    return [_number(record["metrics"].get(tag)) for tag in _COLUMNS.values()]


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}"

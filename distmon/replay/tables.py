"""Read tables of numbers: CSV files and JSON lines, including wandb exports."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from distmon.replay.column_names import STEP, TIME, choose_columns
from distmon.replay.logs import Log, LogError
from distmon.untrusted.documents import parse_json
from distmon.untrusted.files import read_regular
from distmon.untrusted.values import LARGEST_INT, mapping

CSV_SUFFIXES: Final = (".csv", ".tsv", ".txt")
JSON_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
LARGEST_TABLE: Final = 256 << 20
"""Bytes of a file."""
MOST_COLUMNS: Final = 10_000
MOST_RUNS: Final = 500
_RUN_SEPARATOR: Final = " - "
_RANGE_SUFFIXES: Final = ("__MIN", "__MAX")

Rows = Sequence[Mapping[str, Any]]


def read_table(path: Path, requested: Mapping[str, str]) -> list[Log]:
    """Return the runs in a file; an exported wandb chart may hold several."""
    try:
        text = read_regular(path, LARGEST_TABLE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LogError(f"cannot read {path}: {reason}") from None
    problems: list[str] = []
    if path.suffix.lower() in JSON_SUFFIXES:
        rows: Rows = _json_rows(path, text, problems)
    else:
        rows = _csv_rows(path, text)
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    runs = _columns_by_run(columns[:MOST_COLUMNS])
    if len(columns) > MOST_COLUMNS or len(runs) > MOST_RUNS:
        problems.append(f"only the first {MOST_COLUMNS} columns and {MOST_RUNS} runs are read")
    return [
        _log(name, rows, names, requested, problems) for name, names in [*runs.items()][:MOST_RUNS]
    ]


def _csv_rows(path: Path, text: str) -> Rows:
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        names = next(lines, [])
        # A row has what it holds and not a cell for every column: a small file may have many.
        return [dict(zip(names, row, strict=False)) for row in lines if row]
    except csv.Error as error:
        raise LogError(f"{path} is not a readable table: {error}") from None


def _json_rows(path: Path, text: str, problems: list[str]) -> Rows:
    """Read a list of objects, the `log_history` of a `trainer_state.json`, or one object a line."""
    content = _parsed(text)
    if isinstance(content, dict):
        content = content.get("log_history", [content])
    if content is None:
        lines = [line for line in text.splitlines() if line.strip()]
        content = [_parsed(line) for line in lines]
        broken = content.count(None)
        if broken == len(lines):
            raise LogError(f"{path} holds no JSON")
        if broken:
            problems.append(f"{broken} of {len(lines)} lines are invalid JSON and were skipped")
    if not isinstance(content, list):
        raise LogError(f"{path} must be a list of JSON objects, not a {type(content).__name__}")
    return [mapping(row) for row in content if isinstance(row, dict)]


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _columns_by_run(columns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return, by run, the column of each metric. wandb charts have columns `run - metric`."""
    shared: dict[str, str] = {}
    runs: dict[str, dict[str, str]] = {}
    for column in columns:
        run, separator, metric = column.rpartition(_RUN_SEPARATOR)
        if column.endswith(_RANGE_SUFFIXES) or not column:
            continue
        if separator:
            runs.setdefault(run, {})[metric] = column
        else:
            shared[column] = column
    return {run: shared | own for run, own in runs.items()} or {"": shared}


def _log(
    name: str,
    rows: Rows,
    names: Mapping[str, str],
    requested: Mapping[str, str],
    problems: Iterable[str],
) -> Log:
    found = [*problems]
    mapping = choose_columns(names, requested)
    step_column = names.get(mapping.get(STEP, ""))
    time_column = names.get(mapping.get(TIME, ""))
    values: dict[str, dict[int, float]] = {metric: {} for metric in names}
    times: dict[int, float] = {}
    step, skipped = 0, 0
    metrics = {column: metric for metric, column in names.items()}
    for number, row in enumerate(rows, start=1):
        if step_column is None:
            step = number
        else:
            given = row.get(step_column)
            at = _number(given)
            if at is not None and abs(at) < LARGEST_INT:
                step = int(at)
            elif given not in (None, ""):
                skipped += 1
                continue
            # A row without a step, as some loggers write for evaluations, has the last step.
        for column, given in row.items():
            value = _number(given)
            if value is not None and column in metrics:
                values[metrics[column]][step] = value
        when = None if time_column is None else _number(row.get(time_column))
        if when is not None:
            times[step] = when
    if step_column is None:
        found.append("no column has the step: rows are numbered from 1 (--map step=COLUMN)")
    if skipped:
        found.append(f"{skipped} rows have an invalid step and were skipped")
    return Log(values, times, name, tuple(found))


def _number(value: Any) -> float | None:
    """Return the value as float; None when it is missing or not a number. "nan" is NaN."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None

"""Read the folder of a finished, running or crashed run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distmon.errors import RunFolderError
from distmon.metrics import RENAMED, current_name
from distmon.runs import params_file
from distmon.runs.run_folder import ALERTS_FILE, PARAMS_FILE, RECORDS_FILE, read_info


@dataclass(frozen=True)
class Run:
    """One run, in step order; without `all_attempts`, without steps that were run again."""

    path: Path
    info: Mapping[str, Any]
    """Content of `run.json`."""
    records: list[dict[str, Any]]
    """Lines of `records.jsonl`; non-finite numbers are NaN."""
    alerts: list[dict[str, Any]]
    """Lines of `alerts.jsonl`."""
    params: Any
    """pyarrow Table of `params.arrow`: step, attempt, name and the per-parameter metrics."""
    losses: dict[int, float]
    """Loss of every step, including steps between observations."""
    loss_ema: dict[int, float]
    """Moving average of the loss."""
    problems: tuple[str, ...]
    """Parts that could not be read, one sentence each."""


def read_run(path: str | os.PathLike[str], *, all_attempts: bool = False) -> Run:
    """Read the run in `path`; raise RunFolderError when it is not a run folder.

    An attempt that resumed from step r replaces the steps after r of earlier attempts. With
    `all_attempts` everything is returned; `losses` are then those of the latest attempt per step.
    Missing files are read as empty; of truncated or damaged files the intact part is read, and
    `problems` lists what was lost.
    """
    folder = Path(path)
    info = read_info(folder)
    problems: list[str] = []
    records = _in_step_order(_read_lines(folder / RECORDS_FILE, problems))
    alerts = _in_step_order(_read_lines(folder / ALERTS_FILE, problems))
    params = _read_params(folder / PARAMS_FILE, problems)
    for record in records:
        _rename_metrics(record)
        _restore_nan(record)

    last_steps = _last_steps(info)
    losses, loss_ema = _losses(records, last_steps, all_attempts)
    if not all_attempts:
        records = [entry for entry in records if _is_current(entry, last_steps)]
        alerts = [entry for entry in alerts if _is_current(entry, last_steps)]
        params = _current_rows(params, last_steps)
    return Run(folder, info, records, alerts, params, losses, loss_ema, tuple(problems))


def _last_steps(info: Mapping[str, Any]) -> dict[int, float]:
    """Return, by attempt, the last step that no later attempt replaced."""
    last: dict[int, float] = {}
    limit = math.inf
    for entry in sorted(info["attempts"], key=lambda entry: int(entry["attempt"]), reverse=True):
        last[entry["attempt"]] = limit
        limit = min(limit, entry["resumed_from"])
    return last


def _is_current(entry: Mapping[str, Any], last_steps: Mapping[int, float]) -> bool:
    last = last_steps.get(entry["attempt"], math.inf)
    # A partial record at the end of an attempt is repeated by the attempt that resumes there.
    return bool(entry["step"] < last if entry.get("partial") else entry["step"] <= last)


def _current_rows(table: Any, last_steps: Mapping[int, float]) -> Any:
    steps = table["step"].to_numpy()
    attempts = table["attempt"].to_numpy()
    keep = np.ones(len(table), dtype=bool)
    for attempt, last in last_steps.items():
        keep &= (attempts != attempt) | (steps <= last)
    return table if keep.all() else table.filter(pa.array(keep))


def _losses(
    records: list[dict[str, Any]], last_steps: Mapping[int, float], all_attempts: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Return losses and moving averages by step.

    A record has the losses since the previous record. When an attempt resumes between two records,
    the replaced record's losses up to that step are still part of the run.
    """
    values: dict[int, float] = {}
    averages: dict[int, float] = {}
    for record in sorted(records, key=lambda record: int(record["attempt"])):
        last = math.inf if all_attempts else last_steps.get(record["attempt"], math.inf)
        for column, found in (("loss_values", values), ("loss_ema", averages)):
            pairs = zip(record.get("loss_steps", ()), record.get(column, ()), strict=False)
            found.update({step: value for step, value in pairs if step <= last})
    return dict(sorted(values.items())), dict(sorted(averages.items()))


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from None
    entries: list[dict[str, Any]] = []
    broken: list[int] = []
    lines = content.split(b"\n")
    tail = lines[-1]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(line)
        if entry is not None:
            entries.append(entry)
        elif number == len(lines):
            problems.append(
                f"{path.name} ends in the middle of line {number}: "
                f"its last {len(tail)} bytes are ignored"
            )
        else:
            broken.append(number)
    if broken:
        shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        count = "1 broken line" if len(broken) == 1 else f"{len(broken)} broken lines"
        problems.append(f"{path.name} has {count}, skipped: line {shown}")
    return entries


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return None
    if not isinstance(entry.setdefault("attempt", 0), int):
        return None
    return entry


def _read_params(path: Path, problems: list[str]) -> Any:
    tables = [params_file.schema().empty_table()]
    for file in (*params_file.set_aside_files(path), path):
        try:
            history = params_file.read_history(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise RunFolderError(f"cannot read {file}: {error.strerror or error}") from None
        if history.dropped_bytes:
            problems.append(
                f"{file.name} ends in the middle of an entry: "
                f"its last {history.dropped_bytes} bytes are ignored"
            )
        if history.skipped_batches:
            problems.append(f"{file.name} has {history.skipped_batches} damaged entries, skipped")
        if history.table is not None:
            try:
                tables = [pa.concat_tables([*tables, history.table], promote_options="default")]
            except pa.ArrowException:
                problems.append(f"{file.name} has columns of a different type and is ignored")
    return tables[0]


def _rename_metrics(record: dict[str, Any]) -> None:
    """Give the metrics of an older version the names that they have now."""
    for key in ("metrics", "ranks"):
        if RENAMED.keys() & record.get(key, {}).keys():
            record[key] = {current_name(name): value for name, value in record[key].items()}


def _restore_nan(record: dict[str, Any]) -> None:
    """Replace null by NaN in place: JSON has no NaN, so non-finite values are written as null."""
    for key in ("loss_values", "loss_ema"):
        if key in record:
            record[key] = [math.nan if value is None else value for value in record[key]]
    for key in ("metrics", "ranks"):
        for name, value in record.get(key, {}).items():
            if value is None:
                record[key][name] = math.nan
            elif isinstance(value, list):
                record[key][name] = [math.nan if item is None else item for item in value]


def _in_step_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: (entry["step"], entry["attempt"]))

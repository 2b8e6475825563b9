"""Read the folder of a finished, running or crashed run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.table import Table

from distmon.record.summary_table import html_table, rich_table
from distmon.runs import entries, params_file
from distmon.runs.file_tails import LineTail, ParamTail
from distmon.runs.gaps import describe_gaps, missing_observations, missing_rows
from distmon.runs.run_folder import ALERTS_FILE, ENDS_FILE, GAPS_FILE, PARAMS_FILE, RECORDS_FILE
from distmon.runs.run_json import read_info


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
    closed: bool = False
    """Whether the training has closed the monitor of the last attempt, and noted how far it was."""

    def __rich__(self) -> Table:
        """Show what the run has as a table."""
        return rich_table(f"run {self.path}", self._rows)

    def _repr_html_(self) -> str:
        return html_table(f"run {self.path}", self._rows)

    @property
    def _rows(self) -> list[tuple[str, str]]:
        attempts = self.info["attempts"]
        rows = [
            ("last step", str(self.records[-1]["step"]) if self.records else "none"),
            ("records", str(len(self.records))),
            ("parameters", str(len(self.info.get("parameters", ())))),
            ("attempts", str(len(attempts))),
            ("ranks", str(attempts[-1].get("world_size", "")) if attempts else "none"),
        ]
        if self.losses:
            rows.append(("last loss", f"{next(reversed(self.losses.values())):.4g}"))
        newest = [f"{a['severity']} {a['rule']} at step {a['step']}" for a in self.alerts[-5:]]
        rows.append(
            ("alerts", f"{len(self.alerts)}" + (f": {'; '.join(newest)}" if newest else ""))
        )
        return rows + [("could not be read", problem) for problem in self.problems]


def read_run(path: str | os.PathLike[str], *, all_attempts: bool = False) -> Run:
    """Read the run in `path`; raise RunFolderError when it is not a run folder.

    An attempt that resumed from step r replaces the steps after r of earlier attempts. With
    `all_attempts` everything is returned; `losses` are then those of the latest attempt per step.
    Missing files are read as empty; of truncated or damaged files the intact part is read, and
    `problems` lists what was lost.
    """
    news = RunTail(path).read(all_attempts=all_attempts)
    params = _table(news.params, news.problems)
    news.problems.extend(missing_rows(news.info, news.records, {*params["step"].to_pylist()}))
    return Run(
        Path(path),
        news.info,
        news.records,
        news.alerts,
        params,
        news.losses,
        news.loss_ema,
        tuple(news.problems),
        news.closed,
    )


@dataclass(frozen=True)
class News:
    """What a run folder has that it had not at the last reading; fields as those of `Run`."""

    info: Mapping[str, Any]
    replaces: bool
    """Whether this is the whole run: at first, and when an attempt replaced earlier steps."""
    records: list[dict[str, Any]]
    alerts: list[dict[str, Any]]
    params: Iterator[Any]
    """Batches of `params.arrow`, read as they are asked for: before the next `read`."""
    losses: dict[int, float]
    loss_ema: dict[int, float]
    problems: list[str]
    """Complete when `params` is exhausted."""
    closed: bool
    """As that of `Run`."""


class RunTail:
    """Reads a run folder again and again, each time what is new. Holds no file open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._attempts: list[Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._records = LineTail(self.path / RECORDS_FILE, entries.record)
        self._alerts = LineTail(self.path / ALERTS_FILE, entries.alert)
        self._gaps = LineTail(self.path / GAPS_FILE, entries.gap)
        self._ends = LineTail(self.path / ENDS_FILE, entries.end)
        self._closed: set[int] = set()
        """Attempts of which the end was read."""
        self._params = ParamTail(self.path / PARAMS_FILE)

    def read(self, *, all_attempts: bool = False) -> News:
        """Return what is new; raise RunFolderError when it is not a run folder."""
        problems: list[str] = []
        info = read_info(self.path, problems)
        replaces = info["attempts"] != self._attempts or self._records.shrunk
        if replaces:
            # A resumed attempt replaces steps that were read: start over.
            self._attempts = info["attempts"]
            self._forget()
        records = _in_step_order(self._records.read(problems))
        alerts = _in_step_order(self._alerts.read(problems))
        params = self._params.batches(problems)
        problems += describe_gaps(self._gaps.read(problems))
        ends = self._ends.read(problems)
        self._closed.update(end["attempt"] for end in ends)
        if replaces:
            left_out = self._records.left_out > 0
            problems += missing_observations(info, records, ends, left_out)
        last_steps = _last_steps(info)
        losses, loss_ema = _losses(records, last_steps, all_attempts)
        if not all_attempts:
            records = [entry for entry in records if _is_current(entry, last_steps)]
            alerts = [entry for entry in alerts if _is_current(entry, last_steps)]
            params = (_current_rows(batch, last_steps) for batch in params)
        newest = max((entry["attempt"] for entry in info["attempts"]), default=0)
        closed = newest in self._closed
        return News(info, replaces, records, alerts, params, losses, loss_ema, problems, closed)


def _table(batches: Iterator[Any], problems: list[str]) -> Any:
    """Return one table; batches of an older file may lack columns, which are null then."""
    by_schema: list[list[Any]] = []
    for batch in batches:
        if by_schema and by_schema[-1][0].schema.equals(batch.schema):
            by_schema[-1].append(batch)
        else:
            by_schema.append([batch])
    table = params_file.schema().empty_table()
    for group in by_schema:
        try:
            tables = [table, pa.Table.from_batches(group)]
            table = pa.concat_tables(tables, promote_options="default")
        except pa.ArrowException:
            problems.append(f"{PARAMS_FILE} has entries with columns of a different type, ignored")
    return table


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
    keep = np.ones(table.num_rows, dtype=bool)
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


def _in_step_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: (entry["step"], entry["attempt"]))

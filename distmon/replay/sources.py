"""Find and read the recorded runs at a path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from distmon.record.record import Record
from distmon.replay.logs import Log, LogError, records_of_log
from distmon.replay.run_folders import records_of_run
from distmon.replay.settings import Settings, settings_of_run
from distmon.replay.tables import CSV_SUFFIXES, JSON_SUFFIXES, read_table
from distmon.replay.tensorboard import is_event_file, read_events
from distmon.rules.base import name_some
from distmon.runs.reader import read_run
from distmon.runs.run_json import RUN_FILE

Kind = Literal["run folder", "TensorBoard", "table"]
_SHOWN_COLUMNS: Final = 20


@dataclass(frozen=True)
class Source:
    """A file or folder with a recorded run; a table may hold several runs."""

    path: Path
    kind: Kind


@dataclass(frozen=True)
class Recording:
    """One recorded run as records."""

    name: str
    kind: Kind
    records: list[Record]
    notes: tuple[str, ...] = ()
    """Parts that could not be read or used, one sentence each."""
    settings: Settings | None = None
    """The rule settings of the run itself; None when they are unknown."""


def find_sources(path: Path) -> list[Source]:
    """Return the recorded runs at `path` or in the folders below; raise LogError if none."""
    if path.is_file():
        suffix = path.suffix.lower()
        if is_event_file(path):
            return [Source(path, "TensorBoard")]
        if suffix in (*CSV_SUFFIXES, *JSON_SUFFIXES):
            return [Source(path, "table")]
        raise LogError(
            f"{path} has an unknown file type: expected "
            f"{', '.join((*CSV_SUFFIXES, *JSON_SUFFIXES))} or a TensorBoard event file"
        )
    if not path.is_dir():
        raise LogError(f"{path} does not exist")
    found: list[Source] = []
    for folder, below, files in os.walk(path):
        here = Path(folder)
        below.sort()
        if RUN_FILE in files:
            found.append(Source(here, "run folder"))
            below.clear()  # its TensorBoard files have the same values
        elif any(is_event_file(Path(file)) for file in files):
            found.append(Source(here, "TensorBoard"))
    if not found:
        raise LogError(f"{path} holds no recorded run: no {RUN_FILE}, no TensorBoard event files")
    return found


def read_source(
    source: Source, requested: Mapping[str, str] | None = None, interval: int | None = None
) -> list[Recording]:
    """Read the runs of a source; `requested` (metric to column) and `interval` are for logs."""
    if source.kind == "run folder":
        return [_read_run_folder(source.path)]
    if source.kind == "TensorBoard":
        logs = [read_events(source.path)]
    else:
        logs = read_table(source.path, requested or {})
    return [_from_log(source, log, requested or {}, interval) for log in logs]


def _read_run_folder(path: Path) -> Recording:
    run = read_run(path)
    settings, functions = settings_of_run(run.info, str(path / RUN_FILE))
    notes = [*run.problems]
    if functions:
        notes.append(f"rules that are Python functions cannot be replayed: {', '.join(functions)}")
    if run.records and not run.params.num_rows:
        notes.append("no parameter statistics were recorded: rules on parameters are not evaluated")
    return Recording(str(path), "run folder", records_of_run(run), tuple(notes), settings)


def _from_log(
    source: Source, log: Log, requested: Mapping[str, str], interval: int | None
) -> Recording:
    name = f"{source.path}:{log.name}" if log.name else str(source.path)
    try:
        records, unused = records_of_log(log, requested, interval)
    except LogError as error:
        raise LogError(f"{name}: {error}") from None
    notes = [*log.problems]
    if unused:
        notes.append(f"columns that no rule uses: {name_some(unused, _SHOWN_COLUMNS)}")
    return Recording(name, source.kind, records, tuple(notes))

"""`records.jsonl` and `alerts.jsonl`: one line per entry, readable during the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distmon.errors import RunFolderError
from distmon.record.record import GainTable, InsideTable, Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_json import strict_json
from distmon.sinks.atomic_append import append_atomically, check_in_place
from distmon.sinks.base import SinkContext
from distmon.sinks.moved_entries import move_entries, whole_lines
from distmon.untrusted.files import open_for_append, set_aside_other_than_file


def open_sink(context: SinkContext) -> JsonlSink:
    """Return the sink of a monitor."""
    return JsonlSink(context.folder)


class JsonlSink:
    """Appends to both files. A crash loses at most the line being written."""

    writes_files = True

    def __init__(self, folder: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._attempt = folder.attempt
        self._clock = clock
        self._folder = folder
        folder.restore()
        self._records = _open_lines(folder.records_path)
        try:
            self._alerts = _open_lines(folder.alerts_path)
        except BaseException:
            os.close(self._records)
            raise

    def record(self, record: Record) -> None:
        with suppress(RunFolderError):  # of `run.json`; this file may be writable
            self._folder.restore()
        check_in_place(self._records, self._folder.records_path)
        _append_line(self._records, record_entry(record, self._attempt))

    def alert(self, alert: Alert) -> None:
        check_in_place(self._alerts, self._folder.alerts_path)
        entry = {**alert.to_dict(), "attempt": self._attempt, "time": self._clock()}
        _append_line(self._alerts, entry)

    def take_in(self, folder: RunFolder) -> int:
        """Move what another folder has here; return the number of records and alerts."""
        own = self._folder
        moved = move_entries(
            folder.records_path, own.records_path, self._records, whole_lines
        ) + move_entries(folder.alerts_path, own.alerts_path, self._alerts, whole_lines)
        for source, target in (
            (folder.gaps_path, own.gaps_path),
            (folder.ends_path, own.ends_path),
        ):
            if os.path.lexists(source):
                descriptor = _open_lines(target)
                try:
                    move_entries(source, target, descriptor, whole_lines)
                finally:
                    os.close(descriptor)
        return moved

    def close(self) -> None:
        # Each is closed whatever fails: storage that fails is opened again and again.
        with ExitStack() as stack:
            for descriptor in (self._alerts, self._records):
                stack.callback(os.close, descriptor)
                stack.callback(os.fsync, descriptor)


def record_entry(record: Record, attempt: int) -> dict[str, Any]:
    """Return a record as plain values, without the per-parameter metrics of `params.arrow`."""
    steps = sorted(record.losses)
    return {
        "step": record.step,
        "observation": record.observation,
        "time": record.time,
        "attempt": attempt,
        "world_size": record.world_size,
        "applied": record.applied,
        "partial": record.partial,
        "metrics": {tag: float(value) for tag, value in record.metrics.items()},
        "mfu_source": record.mfu_source,
        "loss_steps": steps,
        "loss_values": [float(record.losses[step]) for step in steps],
        "loss_ema": [float(record.loss_ema.get(step, float("nan"))) for step in steps],
        "ranks": {metric: values.tolist() for metric, values in record.ranks.items()},
        "flow": None if record.gradient_gain is None else _gain_entry(record.gradient_gain),
        **({"inside": _inside_entry(record.inside)} if record.inside else {}),
        "evaluations": [asdict(each) for each in record.evaluations],
        "tasks": dict(record.tasks),
        "nonfinite": None if record.nonfinite is None else asdict(record.nonfinite),
        "desync": None if record.desync is None else asdict(record.desync),
        "faults": list(record.faults),
    }


def _gain_entry(gain: GainTable) -> dict[str, Any]:
    return {
        "blocks": list(gain.blocks),
        "input_norm": gain.input_norm.tolist(),
        "output_norm": gain.output_norm.tolist(),
    }


def _inside_entry(tables: Mapping[str, InsideTable]) -> dict[str, Any]:
    return {
        kind: {
            "names": list(table.names),
            "columns": {name: column.tolist() for name, column in table.columns.items()},
        }
        for kind, table in tables.items()
    }


def _append_line(descriptor: int, entry: dict[str, Any]) -> None:
    append_atomically(descriptor, strict_json(entry).encode() + b"\n")


def _open_lines(path: Path) -> int:
    set_aside_other_than_file(path)
    descriptor = open_for_append(path)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            # A crash cut the last line: end it, so that the next entry starts on a new line.
            append_atomically(descriptor, b"\n")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

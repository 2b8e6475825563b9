"""`records.jsonl` and `alerts.jsonl`: one line per entry, readable during the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distmon.record.record import GainTable, Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder, strict_json
from distmon.sinks.atomic_append import append_atomically, open_for_append
from distmon.sinks.base import SinkContext


def open_sink(context: SinkContext) -> JsonlSink:
    """Return the sink of a monitor."""
    return JsonlSink(context.folder)


class JsonlSink:
    """Appends to both files. A crash loses at most the line being written."""

    def __init__(self, folder: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._attempt = folder.attempt
        self._clock = clock
        self._records = _open_lines(folder.records_path)
        self._alerts = _open_lines(folder.alerts_path)

    def record(self, record: Record) -> None:
        _append_line(self._records, record_entry(record, self._attempt))

    def alert(self, alert: Alert) -> None:
        entry = {**alert.to_dict(), "attempt": self._attempt, "time": self._clock()}
        _append_line(self._alerts, entry)

    def close(self) -> None:
        for descriptor in (self._records, self._alerts):
            os.fsync(descriptor)
            os.close(descriptor)


def record_entry(record: Record, attempt: int) -> dict[str, Any]:
    """Return a record as plain values, without the per-parameter metrics of `params.arrow`."""
    steps = sorted(record.losses)
    return {
        "step": record.step,
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


def _append_line(descriptor: int, entry: dict[str, Any]) -> None:
    append_atomically(descriptor, strict_json(entry).encode() + b"\n")


def _open_lines(path: Path) -> int:
    descriptor = open_for_append(path)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        # A crash cut the last line: end it, so that the next entry starts on a new line.
        append_atomically(descriptor, b"\n")
    return descriptor

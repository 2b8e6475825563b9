"""`records.jsonl` and `alerts.jsonl`: one whole line per entry, readable while the run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distmon.alert import Alert
from distmon.record import FlowTable, Record
from distmon.run_folder import RunFolder, strict_json
from distmon.sinks.appending import append_whole, open_for_append


class JsonlSink:
    """Appends to both files. A crash loses at most the line that was being written."""

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
    """A record as plain values. Per-parameter numbers are in `params.arrow`, not here."""
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
        "flow": None if record.flow is None else _flow_entry(record.flow),
        "evaluations": [asdict(each) for each in record.evaluations],
        "tasks": dict(record.tasks),
        "nonfinite": None if record.nonfinite is None else asdict(record.nonfinite),
        "desync": None if record.desync is None else asdict(record.desync),
        "faults": list(record.faults),
    }


def _flow_entry(flow: FlowTable) -> dict[str, Any]:
    return {
        "blocks": list(flow.blocks),
        "input_norm": flow.input_norm.tolist(),
        "output_norm": flow.output_norm.tolist(),
    }


def _append_line(descriptor: int, entry: dict[str, Any]) -> None:
    append_whole(descriptor, strict_json(entry).encode() + b"\n")


def _open_lines(path: Path) -> int:
    descriptor = open_for_append(path)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        # A crash cut the last line: end it here, so that it spoils no other.
        append_whole(descriptor, b"\n")
    return descriptor

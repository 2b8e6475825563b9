"""The recordings of the second corpus: all cases, and their run folders in a small form."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.alarms.audit.faulty import AUDIT_FAULTY
from benchmarks.alarms.audit.healthy import AUDIT_HEALTHY
from benchmarks.alarms.blind.faulty import BLIND_FAULTY
from benchmarks.alarms.blind.healthy import BLIND_HEALTHY
from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty import FAULTY
from benchmarks.alarms.further_cases import FURTHER
from benchmarks.alarms.healthy_cases import HEALTHY
from benchmarks.alarms.practice_cases import PRACTICE_FAULTY, PRACTICE_HEALTHY
from benchmarks.alarms.recording import KEPT_METRICS, KEPT_VERSIONS
from benchmarks.alarms.sealed.faulty import SEALED_FAULTY
from benchmarks.alarms.sealed.healthy import SEALED_HEALTHY
from benchmarks.alarms.silent_cases import SILENT_FAULTY, SILENT_HEALTHY
from benchmarks.alarms.unseen.faulty import UNSEEN_FAULTY
from benchmarks.alarms.unseen.healthy import UNSEEN_HEALTHY
from distmon.collect.signals.step_signals import FIELDS
from distmon.runs.reader import read_run
from distmon.runs.run_folder import ALERTS_FILE, PARAMS_FILE, RECORDS_FILE
from distmon.runs.run_json import RUN_FILE

RECORDINGS: Final = Path(__file__).with_name("recordings")
CASES: Final[dict[str, Case]] = {
    each.name: each
    for each in (
        *(*HEALTHY, *FURTHER, *FAULTY, *SILENT_HEALTHY, *SILENT_FAULTY),
        *(*PRACTICE_HEALTHY, *PRACTICE_FAULTY),
        *(*BLIND_HEALTHY, *BLIND_FAULTY),
        *(*UNSEEN_HEALTHY, *UNSEEN_FAULTY),
        *(*AUDIT_HEALTHY, *AUDIT_FAULTY),
        *(*SEALED_HEALTHY, *SEALED_FAULTY),
    )
}
KEPT_RANK_METRICS: Final = (*FIELDS, "loss", "reported_grad_norm", "norm_reports", "skipped_steps")
"""What a rank says about its training; not how fast it is, and on which machine."""
DROPPED_COLUMNS: Final = (
    *("weight_norm_stderr", "grad_norm_stderr", "update_norm_stderr", "update_absmax"),
    *("grad_mean", "grad_std", "grad_min", "grad_max"),
)
"""Columns that no rule reads."""
DIGITS: Final = 5
MANTISSA: Final = 1 << 13
"""Of the numbers in `params.arrow`: they are kept to 0.01%."""


def compact(run: Path, kept: Path) -> int:
    """Copy a run folder without what describes the machine or takes room; return its size."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    info = json.loads((run / RUN_FILE).read_text())
    info["versions"] = {name: info["versions"][name] for name in KEPT_VERSIONS}
    info.pop("reading", None)
    (kept / RUN_FILE).write_text(json.dumps(info, separators=(",", ":")) + "\n")
    (kept / ALERTS_FILE).write_text("")
    entries = [json.loads(line) for line in (run / RECORDS_FILE).read_text().splitlines()]
    lines = [json.dumps(_rounded(_kept(entry)), separators=(",", ":")) for entry in entries]
    (kept / RECORDS_FILE).write_text("".join(f"{line}\n" for line in lines))
    table = read_run(run, all_attempts=True).params.combine_chunks()
    for i, field in enumerate(table.schema):
        if field.type == pa.float64():
            column = pa.nulls(len(table), pa.float64())
            if field.name not in DROPPED_COLUMNS:
                column = pa.array(_coarse(table[field.name].to_numpy()), pa.float64())
            table = table.set_column(i, field, column)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 19))
    with pa.ipc.new_stream(kept / PARAMS_FILE, table.schema, options=options) as stream:
        stream.write_table(table)
    return sum(file.stat().st_size for file in kept.iterdir())


def pack(folders: Path, half: str) -> int:
    """Replace the archive of one half by the folders of its cases; return its size."""
    RECORDINGS.mkdir(exist_ok=True)
    archive = RECORDINGS / f"{half}.tar.xz"
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name in sorted(CASES):
            if CASES[name].half == half:
                tar.add(folders / name, name, filter=_anonymous)
    return archive.stat().st_size


def unpack(folders: Path) -> None:
    """Write the run folders of both halves."""
    for archive in sorted(RECORDINGS.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 has no filters; the archive is this repository's own.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(folders, **safe)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def _coarse(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values with few bits of mantissa, so that they take little room."""
    mantissa, exponent = np.frexp(values)
    coarse = np.ldexp(np.round(mantissa * MANTISSA) / MANTISSA, exponent)
    return np.where(np.isfinite(values) & (values != np.round(values)), coarse, values)


def _kept(entry: dict[str, Any]) -> dict[str, Any]:
    metrics = {tag: each for tag, each in entry["metrics"].items() if tag.startswith(KEPT_METRICS)}
    ranks = {name: entry["ranks"][name] for name in KEPT_RANK_METRICS if name in entry["ranks"]}
    return {**entry, "time": 0, "metrics": metrics, "ranks": ranks}


def _rounded(value: Any) -> Any:
    """Round to DIGITS, but not whole numbers: they are counts, hashes and checksums."""
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


def _short(value: float | None) -> float | None:
    if value is None or value != value or value.is_integer():
        return value
    return float(f"{value:.{DIGITS}g}")

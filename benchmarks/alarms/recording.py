"""Train the runs of the corpus and keep what a replay of each needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.alarms.scenarios import COMMON, Scenario
from distmon.runs.reader import read_run
from distmon.runs.run_folder import ALERTS_FILE, PARAMS_FILE, RECORDS_FILE
from distmon.runs.run_json import RUN_FILE

TRAINER = Path(__file__).resolve().parents[2] / "launch/train.py"
LOST = 30
"""Steps that a run which is resumed has made after its checkpoint, and makes again."""
KEPT_VERSIONS = ("distmon", "torch")
KEPT_METRICS = ("monitor/", "debug/", "train/", "gradient_monitor/", "evaluation/", "tasks/")
"""What the training did; not how fast, and on which machine."""
EARLIEST = 1.5e9
"""A number above is a Unix time, of which six digits would leave only days."""


class RecordingFailed(Exception):
    """The trainer of a run failed."""


def record(scenario: Scenario, corpus: Path, seed: int = 0) -> Path:
    """Train one scenario and replace its recording; return its folder."""
    kept = corpus / scenario.name
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        _train(scenario, where, seed)
        run = where / scenario.name
        _clean(run)
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for name in (RUN_FILE, RECORDS_FILE, PARAMS_FILE, ALERTS_FILE):
            shutil.copyfile(run / name, kept / name)
    return kept


def _train(scenario: Scenario, where: Path, seed: int) -> None:
    arguments = [*COMMON.split(), *scenario.arguments.split(), "--seed", str(seed)]
    # A relative folder, so that the recording does not say where it was made.
    arguments += ["--monitor.run-dir", scenario.name]
    if scenario.resumed_at is None:
        _start(scenario, arguments, where)
        return
    saved = ["--save-every", str(scenario.resumed_at)]
    _start(scenario, [*arguments, *saved, "--steps", str(scenario.resumed_at + LOST)], where)
    checkpoint = f"runs/checkpoints/step-{scenario.resumed_at:06d}.pt"
    _start(scenario, [*arguments, "--resume", checkpoint], where)


def _start(scenario: Scenario, arguments: list[str], where: Path) -> None:
    command = [sys.executable]
    if scenario.ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        command += [*torchrun, f"--nproc-per-node={scenario.ranks}"]
    done = subprocess.run(
        [*command, str(TRAINER), *arguments],
        cwd=where,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RecordingFailed(
            f"{scenario.name}: the trainer ended with code {done.returncode}: {done.stderr[-2000:]}"
        )


def _clean(run: Path) -> None:
    """Remove what describes the machine, and what only takes room.

    So the rules about speed and devices have nothing to evaluate: what they would find depends on
    what else the machine did. And so a recording can be made anywhere.

    Numbers are rounded, by less than any threshold could notice, and the many small batches packed
    into one: half the size.
    """
    info = json.loads((run / RUN_FILE).read_text())
    info["versions"] = {name: info["versions"][name] for name in KEPT_VERSIONS}
    (run / RUN_FILE).write_text(json.dumps(info, separators=(",", ":")) + "\n")
    for name in (RECORDS_FILE, ALERTS_FILE):
        entries = [json.loads(line) for line in (run / name).read_text().splitlines()]
        lines = [json.dumps(_rounded(_kept(entry)), separators=(",", ":")) for entry in entries]
        (run / name).write_text("".join(f"{line}\n" for line in lines))
    table = read_run(run, all_attempts=True).params.combine_chunks()
    for i, field in enumerate(table.schema):
        if field.type == pa.float64():
            column = table[field.name].cast(pa.float32(), safe=False).cast(pa.float64())
            table = table.set_column(i, field, column)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 19))
    with pa.ipc.new_stream(run / PARAMS_FILE, table.schema, options=options) as stream:
        stream.write_table(table)


def _kept(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the machine and its rank telemetry; an alert as it is."""
    if "metrics" not in entry:
        return entry
    metrics = {tag: each for tag, each in entry["metrics"].items() if tag.startswith(KEPT_METRICS)}
    return {**entry, "metrics": metrics, "ranks": {}}


def _rounded(value: Any) -> Any:
    """Round to six digits, but not whole numbers: they are counts, hashes and checksums."""
    if isinstance(value, float) and not value.is_integer():
        return round(value, 2) if value > EARLIEST else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value

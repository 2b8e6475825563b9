"""Good inputs to start from: small runs of this repository, configs, and logs of other tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RUNS: Final = ("nan-planted", "resumed", "desync", "two-ranks", "tasks")
LINES: Final = 5
"""Records that are kept of each run, so that an input takes milliseconds."""
CONFIG: Final = """\
interval: 20
sinks: [console, jsonl]
run_dir: runs/x
notify: {urls: ["slack://token"], severity: warning}
mfu: {peak_flops: 1.0e12, model: {layers: 2, width: 8, heads: 2, vocabulary: 100}}
actions: {stop: [nonfinite], bundle: [critical]}
rules:
  frozen: {patience: 2, ratio: 1.0e-9}
  loss_spike: &spike {enabled: false}
  straggler: *spike
  mine: {when: "grad_norm > 5 * median(grad_norm, 10)", message: "{grad_norm}"}
"""
CSV: Final = """\
step,loss,grad_norm,val_loss,_timestamp,run-1 - loss,run-2 - loss
1,5.1,1.0,,1700000000,2,3
2,4.9,1.1,5.0,1700000001,2,3
3,nan,inf,4.9,1700000002,2,3
"""


def write_seeds(folder: Path) -> dict[str, Path]:
    """Write all seeds below `folder`, and return them by name."""
    found: dict[str, Path] = {}
    for name in RUNS:
        found[f"run/{name}"] = _shortened(ROOT / "tests" / "runs" / name, folder / name)
    files = {"config.yaml": CONFIG, "log.csv": CSV, "config.json": _json_config()}
    files["log.jsonl"] = "".join(
        json.dumps({"step": step, "train/loss": 5.0 - step / 10, "lr": 1e-3, "_timestamp": step})
        + "\n"
        for step in range(1, 12)
    )
    files["trainer_state.json"] = json.dumps(
        {"log_history": [{"step": s, "loss": 2.0, "grad_norm": 1.0} for s in range(1, 8)]}
    )
    for name, text in files.items():
        found[name] = folder / name
        found[name].write_text(text)
    events = folder / "events"
    _write_events(events)
    found["events"] = events
    return found


def _shortened(source: Path, target: Path) -> Path:
    from distmon.runs import params_file

    shutil.copytree(source, target)
    for name in ("records.jsonl", "alerts.jsonl"):
        file = target / name
        if file.exists():
            file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:LINES]))
    history = target / "params.arrow"
    if history.exists():
        ends = [end for _, end in params_file.whole_messages(history)][: LINES + 1]
        with open(history, "r+b") as opened:
            opened.truncate(ends[-1])
    return target


def _json_config() -> str:
    return json.dumps({"interval": 10, "rules": {"frozen": {"patience": 1}}, "include": ["a*"]})


def _write_events(folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step in range(8):
        value = Summary.Value(tag="train/loss", simple_value=5.0 - step / 10)
        writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[value])))
    writer.close()

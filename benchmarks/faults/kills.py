"""`python -m benchmarks.faults.kills --times 50`: `kill -9` at random times, under load.

The training alone is killed, or together with its writer process, in turn. Exit code 1 when a
folder cannot be read, or when only the training was killed and records miss before the last one.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

_STEP: Final = struct.Struct("<q")
LONGEST_S: Final = 300.0
"""For the start of a training, and for the end of its writer."""


@dataclass(frozen=True)
class Kill:
    """What one kill has left."""

    whom: str
    steps: int
    """Steps after which `monitor.step` had returned."""
    problem: str = ""
    """Why the folder cannot be read."""
    missing_at_end: int = 0
    """Steps after the last record."""
    holes: int = 0
    """Steps before the last record without one."""
    params_behind: int = 0
    """Steps with a record and without rows in `params.arrow`."""


def main() -> int:
    """Kill, read, and print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--load", type=int, default=2 * (os.cpu_count() or 1), help="busy processes"
    )
    given = parser.parse_args()
    import distmon.attach  # imported once, so that the children of the fork need not
    import distmon.runtime.assembly  # noqa: F401

    draw, kills = random.Random(given.seed), []
    with _busy(given.load):
        for number in range(given.times):
            whom = ("training", "both")[number % 2]
            kills.append(kill_once(whom, draw.uniform(0.0, 3.0)))
            print(f"{number + 1}: {kills[-1]}", flush=True)
        load = os.getloadavg()[0]
    print("\n".join(table(kills)))
    print(
        f"seed {given.seed}, {given.load} busy processes, load {load:.1f}, {os.cpu_count()} cores"
    )
    bad = [k for k in kills if k.problem or (k.whom == "training" and k.holes)]
    return 1 if bad else 0


def table(kills: Sequence[Kill]) -> list[str]:
    """Return a row for each kind, as Markdown."""
    lines = [
        "| killed | times | folders that cannot be read | steps until then "
        "| most steps without a record: at the end / before it | most records without rows |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for whom in ("training", "both"):
        rows = [kill for kill in kills if kill.whom == whom]
        if rows:
            steps = [kill.steps for kill in rows]
            name = {"training": "the training", "both": "training and writer"}[whom]
            lines.append(
                f"| {name} | {len(rows)} "
                f"| {sum(bool(kill.problem) for kill in rows)} | {min(steps)} to {max(steps)} "
                f"| {max(k.missing_at_end for k in rows)} / {max(k.holes for k in rows)} "
                f"| {max(k.params_behind for k in rows)} |"
            )
    return lines


def kill_once(whom: str, after_s: float) -> Kill:
    """Train in a process, kill it `after_s` seconds after its first step, and read its folder."""
    folder = Path(tempfile.mkdtemp(prefix="distmon-kill-"))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _train(folder / "run", write)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as reports:
        if not select.select([reports], [], [], LONGEST_S)[0]:
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError("the training did not start")
        (writer,) = _STEP.unpack(reports.read(_STEP.size))
        time.sleep(after_s)
        for victim in (pid, *([writer] if whom == "both" else [])):
            os.kill(victim, signal.SIGKILL)
        os.waitpid(pid, 0)
        steps = len(reports.read()) // _STEP.size
    _wait_for_the_end_of(writer)
    kill = _read(folder / "run", whom, steps)
    shutil.rmtree(folder, ignore_errors=True)
    return kill


def _train(run: Path, reports: int) -> None:
    """Train until killed; report the writer process after the first step, and then every step."""
    import distmon

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config: dict[str, Any] = {
        "interval": 1, "first_observation": 1, "budget": None, "run_dir": str(run),
        "sinks": ["console", "jsonl", "arrow", "tensorboard"],
    }  # fmt: skip
    monitor = distmon.attach(model, optimizer, config)
    started = False
    while True:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
        if not started:
            os.write(reports, _STEP.pack(monitor.cycle.worker.process.pid))
            started = True
        os.write(reports, _STEP.pack(1))
        time.sleep(0.005)


def _wait_for_the_end_of(pid: int) -> None:
    limit = time.monotonic() + LONGEST_S
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise TimeoutError(f"the writer process {pid} has not ended")


def _read(run: Path, whom: str, steps: int) -> Kill:
    from distmon.errors import DistmonError
    from distmon.runs.reader import read_run

    try:
        found = read_run(run)
    except DistmonError as error:
        return Kill(whom, steps, str(error))
    present = {record["step"] for record in found.records}
    last = max(present, default=0)
    rows = {*found.params["step"].to_pylist()}
    return Kill(
        whom,
        steps,
        missing_at_end=max(0, steps - last),
        holes=len({*range(1, last + 1)} - present),
        params_behind=len(present - rows),
    )


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep the cores busy with processes of the same priority."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            while True:
                pass
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())

"""One training at interval 1 with all local sinks, in which something goes wrong every so often."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

STEADY_S: Final = 600.0
"""A writer process that has worked for so long is replaced at once."""
SINKS: Final = ("jsonl", "arrow", "tensorboard", "prometheus", "logging_lines")


@dataclass
class Soaked:
    """What was seen over the whole time."""

    steps: int = 0
    faults: int = 0
    losses_differ: int = 0
    """Steps whose loss was not that of the twin."""
    exceptions: list[str] = field(default_factory=list)
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)
    """Seconds, MB of memory, open files, threads."""
    longest_s: float = 0.0
    missing: int = 0
    """Observed steps without a record, in the run folder or one that took its place for a while."""
    unnamed: int = 0
    """Those of them of which the run folder does not say that they are missing."""
    named: list[str] = field(default_factory=list)

    def slope(self, column: int) -> float:
        """Return the growth per hour of a column of `samples`, over the second half."""
        half = self.samples[len(self.samples) // 2 :]
        if len(half) < 3:
            return float("nan")
        hours = np.array([sample[0] for sample in half]) / 3600
        return float(np.polyfit(hours, [sample[column] for sample in half], 1)[0])


def soak(folder: Path, seconds: float, seed: int = 0, fault_every: int = 50) -> Soaked:
    """Train for some time; model and twin take the same steps."""
    import distmon

    torch.set_num_threads(1)
    soaked, draw = Soaked(), random.Random(seed)
    model, optimizer = _training()
    twin, twin_optimizer = _training()
    run = folder / "run"
    config: dict[str, Any] = {
        "interval": 1, "first_observation": 1, "budget": None, "sinks": SINKS, "run_dir": str(run),
        "prometheus": {"port": 0}, "spool_dir": str(folder / "spool"), "replica_check": False,
        "total_steps": 10**9,
    }  # fmt: skip
    monitor = distmon.attach(model, optimizer, config)
    began = sampled = time.monotonic()
    undo: Callable[[], None] | None = None
    batches, twin_batches = (torch.Generator().manual_seed(1) for _ in range(2))
    while time.monotonic() - began < seconds:
        soaked.steps += 1
        if undo is not None and soaked.steps % fault_every == fault_every // 2:
            undo()
            undo = None
        if soaked.steps % fault_every == 0:
            soaked.faults += 1
            undo = draw.choice(FAULTS)(monitor, run, draw)
        begin = time.monotonic()
        loss = _step(model, optimizer, batches)
        try:
            monitor.step(loss=loss, tokens=16)
        except Exception as error:
            soaked.exceptions.append(f"step {soaked.steps}: {error!r}"[:300])
        soaked.longest_s = max(soaked.longest_s, time.monotonic() - begin)
        expected = _step(twin, twin_optimizer, twin_batches)
        soaked.losses_differ += float(loss.detach()) != float(expected.detach())
        if time.monotonic() - sampled > max(0.5, seconds / 500):
            sampled = time.monotonic()
            soaked.samples.append((sampled - began, _memory(), _files(), threading.active_count()))
        time.sleep(0.005)
    if undo is not None:
        undo()
    monitor.close()
    _count(run, soaked)
    return soaked


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Generator
) -> torch.Tensor:
    inputs = torch.randn(16, 8, generator=batches)
    optimizer.zero_grad()
    loss: torch.Tensor = model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _count(run: Path, soaked: Soaked) -> None:
    from distmon.errors import DistmonError
    from distmon.runs.reader import read_run

    found = read_run(run, all_attempts=True)
    soaked.named = [*found.problems]
    present = {record["step"] for record in found.records}
    # Holes before the last record are named by the numbers of the observations around them, those
    # after it by the end of the run.
    last = max((*present, *_ends(run)), default=0)
    for folder in run.parent.glob("between-*"):
        with suppress(DistmonError):
            present |= {each["step"] for each in read_run(folder, all_attempts=True).records}
    missing = {*range(1, soaked.steps + 1)} - present
    soaked.missing = len(missing)
    listed = _listed(run)
    soaked.unnamed = sum(step > last and step not in listed for step in missing)


def _ends(run: Path) -> list[int]:
    """Return the steps up to which `ends.jsonl` numbers the observations."""
    file = run / "ends.jsonl"
    return (
        [json.loads(line)["step"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


def _listed(run: Path) -> set[int]:
    """Return the steps that `gaps.jsonl` counts as lost records of `records.jsonl`."""
    file = run / "gaps.jsonl"
    gaps = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {
        step
        for gap in gaps
        if gap["sink"] in ("jsonl", "writer") and gap["what"] == "record"
        for step in range(gap["step"], gap["last_step"] + 1)
    }


def _memory() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _nothing() -> None:
    return None


def _folder_moves(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    away = run.with_name("away")

    def back() -> None:
        if run.exists():
            # What was written meanwhile is kept beside it, where `read_run` does not look.
            shutil.move(run, run.with_name(f"between-{time.monotonic_ns()}"))
        away.rename(run)

    run.rename(away)
    return back


def _file_becomes_folder(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    file = run / draw.choice(("alerts.jsonl", "params.arrow"))
    kept = file.with_suffix(".kept")
    file.rename(kept)
    file.mkdir()

    def back() -> None:
        if file.is_dir():
            file.rmdir()
        kept.rename(file)

    return back


def _odd_value(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    monitor.evaluated(val_loss=draw.choice(["x", None, 1j, float("nan"), 10**400, [1]]))
    return _nothing


def _bad_state(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    monitor.load_state_dict(draw.choice([{"version": 99}, [], "x", {"version": 2}]))
    return _nothing


def _own_state(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    monitor.load_state_dict(monitor.state_dict())
    return _nothing


def _fork(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _nothing


def _collect(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    gc.collect()
    return _nothing


def _many_phases(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    for _ in range(3000):
        with monitor.phase("evaluation"):
            pass
    return _nothing


def _writer_ends(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    process = getattr(monitor.cycle.worker, "process", None)
    # One that was started lately would be replaced after a pause.
    if process is not None and _age(process.pid) > 1.2 * STEADY_S:
        process.kill()
    return _nothing


def _writer_stops(monitor: Any, run: Path, draw: random.Random) -> Callable[[], None]:  # noqa: ARG001
    process = getattr(monitor.cycle.worker, "process", None)
    if process is None:
        return _nothing
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


def _age(pid: int) -> float:
    """Return the seconds since a process was started; 0 when there is none."""
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError):
        return 0.0
    return up - started / os.sysconf("SC_CLK_TCK")


Plant = Callable[[Any, Path, random.Random], Callable[[], None]]
FAULTS: Final[tuple[Plant, ...]] = (
    _folder_moves,
    _file_becomes_folder,
    _odd_value,
    _bad_state,
    _own_state,
    _fork,
    _collect,
    _many_phases,
    _writer_ends,
    _writer_stops,
)
